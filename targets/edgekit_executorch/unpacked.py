"""Reads the weights back from a program's bytes, as its kernels use them. Needs no vendor library.

Constants have no names. They are identified by their order in the method, which is the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from edgekit.contracts.plan import Plan
from edgekit.errors import DamagedArtifact
from edgekit.formats.safetensors import TensorBytes
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor
from edgekit_executorch.constants import Constants, Floats, MethodConstants
from edgekit_executorch.flatbuffer import sound
from edgekit_executorch.layer_tensors import all_norms_of, modules_of, swaps_of
from edgekit_executorch.layout import APPEND, FORWARD, PROGRAM, STEP, exit_after
from edgekit_executorch.stored import Constant, Linear

_NAMES_PIECE_BYTES = 3 << 10


def weights(plan: Plan, files: Path) -> Iterator[tuple[str, Floats]]:
    """Yield every tensor of the model by its name, dequantised."""
    path, model = files / PROGRAM, plan.model
    with sound(path) as data:
        constants = Constants(path, data)
        names = constants.methods
        append = _Named(path, model, constants, constants.used_by(APPEND))
        for method in {STEP, FORWARD} & names:
            if _Named(path, model, constants, constants.used_by(method)).constants != append.constants:
                raise DamagedArtifact(f"{path}: its methods multiply with different weights; export it again")
        for layer in plan.exits:
            append.check_exit(layer, constants.used_by(exit_after(layer)))
        for tensor in model.tensors():
            yield tensor.name, append.tensor(tensor)


def tensor_places(files: Path) -> list[TensorBytes]:
    """Return the byte ranges of a program's weights, each with its scales, and of delegated parts.

    Tables and parts name weights by their hashes, so a changed weight changes names: names in a part
    have a separate range, and names in the tables are cut into small pieces.
    """
    path = files / PROGRAM
    with sound(path) as data:
        constants = Constants(path, data)
        starts = constants.starts()
        tables, places = starts[0], [*pairwise([*starts, len(data)])]
        names = constants.names_end(0, tables)
        places += [*pairwise([*range(0, names, _NAMES_PIECE_BYTES), names, tables])]
        places += [(constants.names_end(*place), place[1]) for place in places if constants.is_part(place[0])]
        return [TensorBytes(path, start, stop - start) for start, stop in sorted(places)]


class _Named:
    """The constants of one method under the model's names."""

    def __init__(self, path: Path, model: ModelSpec, constants: Constants, used: MethodConstants) -> None:
        self._path, self._model, self._constants = path, model, constants
        self._swaps = swaps_of(model)
        linears = [each for each in used.linears if not self._is_arithmetic(each)]
        modules, norms = modules_of(model), all_norms_of(model)
        if (len(used.tables), len(linears), len(used.factors)) != (1, len(modules), len(norms)):
            raise DamagedArtifact(
                f"{path}: has {len(linears)} matrices and {len(used.factors)} norms, "
                f"its plan says {len(modules)} and {len(norms)}; export it again"
            )
        self._table = used.tables[0]
        self._head = linears[-1]
        self._linears: dict[str, list[Linear]] = {}
        for (module, _), stored in zip(modules, linears, strict=True):
            self._linears.setdefault(module, []).append(stored)
        self._norms = dict(zip(norms, used.factors, strict=True))
        self.constants = (self._table, linears, used.factors)

    def check_exit(self, layers: int, used: MethodConstants) -> None:
        """Raise `DamagedArtifact` if the exit after `layers` uses other weights than those layers and the head."""
        linears, norms = [each for each in used.linears if not self._is_arithmetic(each)], used.factors
        table, all_linears, all_norms = self.constants
        share = len(self._model.layers)
        expected = ([table], [*all_linears[: layers * (len(all_linears) - 1) // share], all_linears[-1]])
        kept = [*all_norms[: layers * (len(all_norms) - 1) // share], all_norms[-1]]
        if (used.tables, linears, norms) != (*expected, kept):
            raise DamagedArtifact(f"{self._path}: its exit multiplies with other weights; export it again")

    def tensor(self, tensor: Tensor) -> Floats:
        """Return one tensor of the model, joined if several constants store it."""
        floats = self._constants.floats
        if tensor.role == "norm":
            weight = floats(self._norms[tensor.module])
            return self._checked(tensor, weight - np.float32(1.0) if self._model.norm_offset else weight)
        if tensor.role == "embedding":
            table = self._checked(tensor, floats(self._table))
            if self._model.tied and self._head.weight != self._table:
                self._check_copy(tensor, table, floats(self._head.weight))
            return table
        parts = self._linears[tensor.module]
        if tensor.name.endswith(".bias"):
            stored: list[Constant] = [part.bias for part in parts if part.bias is not None]
            if len(stored) != len(parts):
                raise DamagedArtifact(f"{self._path}: holds no {tensor.name}; export it again")
        else:
            stored = [part.weight for part in parts]
        return self._checked(tensor, np.concatenate([floats(part) for part in stored]))

    def _checked(self, tensor: Tensor, values: Floats) -> Floats:
        if values.shape != tensor.shape:
            raise DamagedArtifact(f"{self._path}: {tensor.name} is {values.shape}, its plan says {tensor.shape}")
        return values

    def _check_copy(self, tensor: Tensor, table: Floats, head: Floats) -> None:
        """Raise `DamagedArtifact` unless a separate copy of a tied head, with other scales, has equal values."""
        if table.shape != head.shape:
            raise DamagedArtifact(f"{self._path}: {tensor.name} is {table.shape}, and the head {head.shape}")
        different = np.argwhere(table != head)
        if len(different):
            place = tuple(int(index) for index in different[0])
            raise DamagedArtifact(
                f"{self._path}: {tensor.name}{list(place)} is {table[place]:.6g} where tokens are looked up and "
                f"{head[place]:.6g} in the head, which is the same tensor; export it again"
            )

    def _is_arithmetic(self, linear: Linear) -> bool:
        """Return True for products with a constant that is no weight: means of norms, and swaps of a head's pairs."""
        weight = linear.weight
        if weight.kind != "float32":
            return False
        swaps = [swap for swap in self._swaps if swap.shape == weight.shape]
        return weight.shape[0] == 1 or any(np.array_equal(self._constants.floats(weight), swap) for swap in swaps)
