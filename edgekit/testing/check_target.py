"""The conformance suite of targets: promises before, during and after an export."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.contracts.memory import MemoryLoad, total
from edgekit.contracts.target import Offer, Target
from edgekit.errors import EdgekitError
from edgekit.testing.check_engine import check_engine
from edgekit.testing.judging import require
from edgekit.testing.plan import fake_model

if TYPE_CHECKING:
    from edgekit.contracts.device import DeviceProfile
    from edgekit.contracts.neutral import NeutralWeights
    from edgekit.contracts.plan import Plan
    from edgekit.model.spec import ModelSpec


def check_target(target: Target, devices: list[DeviceProfile], model: ModelSpec | None = None) -> None:
    """Raise AssertionError unless the target's name, `missing` and `offers` keep their contracts.

    At least one device must list the target; for others it must offer nothing.
    """
    require(bool(target.name) and target.name == target.name.lower(), f"a target named {target.name!r}")
    missing = target.missing()
    require(missing is None or bool(missing.strip()), "`missing` is empty: it must be the reason and the fix, or None")
    model = model or fake_model()
    offered = 0
    for device in devices:
        first, second = list(target.offers(model, device)), list(target.offers(model, device))
        require(first == second, f"{device.name}: two calls give different offers")
        listed = device.targets.get(target.name, ())
        for offer in first:
            _check_offer(target, offer, listed, device.name, model)
        offered += len(first)
    require(offered > 0, "it offers nothing on any of these devices")


def _check_offer(target: Target, offer: Offer, backends: tuple[str, ...], device: str, model: ModelSpec) -> None:
    what = f"{device}: {offer.backend} {offer.recipe.name}"
    require(offer.target == target.name, f"{what}: the offer names the target {offer.target}")
    require(offer.backend in backends, f"{what}: the device lists only {backends}")
    require(bool(offer.capabilities.kv_bits), f"{what}: no cache width")
    load = MemoryLoad(model, offer.recipe, offer.backend, offer.memory, 64, 1, offer.capabilities.kv_bits[0], 64)
    terms = list(target.memory(load))
    require(all(term.bytes >= 0 for term in terms), f"{what}: a term of memory is negative")
    require(total(terms, "mapped_weights_bytes", "private_weights_bytes") > 0, f"{what}: its weights take no memory")
    require(0 < offer.speed.bandwidth_share <= 1, f"{what}: decodes at a share of the bandwidth that is none")
    require(bool(offer.memory.source and offer.speed.source), f"{what}: figures without a source")
    require(offer.refusal is None or bool(offer.refusal.strip()), f"{what}: refused without a word")


def check_export(
    target: Target, plan: Plan, weights: NeutralWeights, *, exact: bool, tolerance: float, sequences: int = 100
) -> None:
    """Raise AssertionError unless two exports of one plan are equal and the engine passes `check_engine`."""

    def silent(done: float, total: float, what: str) -> None:
        require(0 <= done <= total and bool(what), f"progress {done} of {total} {what!r}")

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        for folder in (one, other):
            target.export(plan, weights, Path(folder), silent)
        require(bool(_hashes(Path(one))), "nothing was written")
        require(_hashes(Path(one)) == _hashes(Path(other)), "two exports of one plan differ")
        check_engine(
            lambda: target.open(plan, Path(one), exact=exact), exact=exact, tolerance=tolerance, sequences=sequences
        )
        damaged = Path(other)
        for path in damaged.rglob("*"):
            if path.is_file():
                path.write_bytes(b"")
        try:
            target.open(plan, damaged).close()
        except EdgekitError:
            return
        raise AssertionError("emptied files were opened")


def check_weights(target: Target, plan: Plan, files: Path, weights: NeutralWeights) -> None:
    """Raise AssertionError unless the exported `files` hold the neutral weights again (`NeutralWeights.holds`)."""
    import numpy as np

    wanted = {tensor.name for tensor in weights.model.tensors()}
    for name, values in target.weights(plan, files):
        require(name in wanted, f"it unpacks {name}, which the model does not have, or for the second time")
        wanted.remove(name)
        is_held = weights.holds(name, values)
        if weights.model.norm_offset and name.endswith("norm.weight"):  # the factor that engines multiply with
            is_held = np.array_equal(values + np.float32(1), weights.tensor(name) + np.float32(1))
        require(is_held, f"{name}, unpacked as {values.shape}, is not what was packed")
    require(not wanted, f"it does not unpack {sorted(wanted)[:3]}")


def _hashes(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
