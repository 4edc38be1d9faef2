"""Reads every matrix back from an artifact's files, and compares it with the one that it was packed from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.contracts.target import Target
from edgekit.errors import TargetFailed, TargetMissing, Unsupported, quote_short
from edgekit.formats.int_packing import row_slices

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The largest error of a vendor's own format, as a share of the matrix: 3 bits lose .2, and a matrix in another's place
# differs by 1.4.
MAX_ROUNDING = 0.6


class ReadBack(NamedTuple):
    """The result of reading back: a line for people, and whether every matrix could be read."""

    summary: str
    is_read: bool

    def __str__(self) -> str:
        return self.summary


class StoredWeights:
    """The matrices as an artifact's files hold them, for the reference decoder, which asks for them in their order.

    Norms and biases, which no format rounds, are taken from the model. Keeps the embedding, and matrices that were read
    before they were asked for; a matrix that was returned is dropped.
    """

    def __init__(self, target: Target, plan: Plan, weights: NeutralWeights, files: Path) -> None:
        self._target, self._plan, self._weights, self._files = target, plan, weights, files
        self._modules = set(weights.modules())
        self._left, self._table = target.weights(plan, files), f"{plan.model.prefix}embed_tokens.weight"
        self._held: dict[str, NDArray[np.float32]] = {}

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name.removesuffix(".weight") not in self._modules:
            return self._weights.tensor(name)
        for again in (False, True):
            while name not in self._held and (pair := next(self._left, None)) is not None:
                if pair[0].removesuffix(".weight") in self._modules:
                    self._held[pair[0]] = pair[1]
            if name in self._held or again:
                break
            self._left = self._target.weights(self._plan, self._files)
        return self._held[name] if name == self._table else self._held.pop(name)

    def dequantised(self, module: str, rows: slice) -> NDArray[np.float32]:
        name = f"{module}.weight"
        if name not in self._held:
            self._held[name] = self.tensor(name)
        return self._held[name][rows]

    def release(self) -> None:
        self._held.clear()
        self._weights.release()


def failed(target: Target, reason: str) -> TargetFailed:
    return TargetFailed(f"{target.name}: {reason}; nothing was written. This is a bug: please report the plan")


def read_back(target: Target, plan: Plan, weights: NeutralWeights, files: Path) -> ReadBack:
    """Compare every packed matrix with integer × scale, bit for bit; in a vendor's own format, with the float matrix.

    Raises `TargetFailed` if one is wrong, missing or there twice.
    """
    is_native = plan.recipe.is_native()
    expected = {module for module in weights.modules() if is_native or not weights.format_of(module).is_float}
    errors: dict[str, float] = {}
    try:
        for name, values in target.weights(plan, files):
            module = name.removesuffix(".weight")
            if module == name or module not in expected:
                continue
            if module in errors:
                raise failed(target, f"{quote_short(name)} was packed twice")
            errors[module] = _error(values, name, weights, is_native)
            if not errors[module] <= MAX_ROUNDING:
                raise failed(target, f"{name} was packed wrongly")
    except (TargetMissing, Unsupported) as refused:
        return ReadBack(f"not read back: {refused}", is_read=False)
    finally:
        weights.release()
    if missing := sorted(expected - errors.keys()):
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise failed(target, f"{missing[0]}.weight{others} cannot be found in the written files")
    if not is_native:
        what = ", their integers" * plan.recipe.has_minima
        return ReadBack(f"{len(errors)} quantised matrices read back{what} bit for bit", is_read=True)
    furthest = max(errors.values(), default=0.0)
    return ReadBack(f"{len(errors)} matrices read back, at most {furthest:.0%} from the float ones", is_read=True)


def _error(values: NDArray[np.float32], name: str, weights: NeutralWeights, is_native: bool) -> float:
    """Return the distance of a matrix from the one that it was packed from, as a share; infinite if integers differ."""
    import numpy as np

    if values.shape != weights.tensor_of(name.removesuffix(".weight")).shape:
        return np.inf
    of_error = of_matrix = 0.0
    for rows in row_slices(values.shape):
        if not is_native and not weights.holds(name, values[rows], rows):
            return np.inf
        if is_native:
            exact = weights.tensor(name, rows)
            of_error += float(np.linalg.norm(values[rows] - exact)) ** 2
            of_matrix += float(np.linalg.norm(exact)) ** 2
    return float(np.sqrt(of_error / (of_matrix or 1.0)))
