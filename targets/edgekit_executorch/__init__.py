"""The executorch target: what ExecuTorch could run, at what cost. Importing this package imports no vendor library."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from edgekit.device import DeviceProfile
from edgekit.errors import Unsupported
from edgekit.interfaces import Engine, Offer, Progress
from edgekit.model import ModelSpec
from edgekit.plan import Plan
from edgekit.weights.neutral import NeutralWeights

__all__ = ["ExecutorchTarget"]

_PLANS_ONLY = "the executorch target of this version plans, and can neither export nor run yet; use --target onnx"


class ExecutorchTarget:
    """ExecuTorch, for planning."""

    name = "executorch"

    def missing(self) -> str | None:
        if find_spec("executorch") is None:
            return "executorch is not installed; pip install 'edgekit[executorch]'"
        return None

    def offers(self, model: ModelSpec, device: DeviceProfile) -> Iterable[Offer]:
        from edgekit_executorch.offers import offers

        return offers(model, device)

    def export(self, plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
        raise Unsupported(_PLANS_ONLY)

    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> Engine:
        raise Unsupported(_PLANS_ONLY)
