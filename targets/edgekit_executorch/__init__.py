"""The executorch target: programs for phones, and an engine that runs the same programs on a desktop.

Importing this package imports no vendor library; each method imports what it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.common.progress import Progress
from edgekit.common.units import MIB
from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.engine import Engine
from edgekit.contracts.memory import ExportCosts, MemoryLoad, Term
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.target import KVRounding, Offer, Target
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.neutral import NeutralWeights
    from edgekit.formats.safetensors import TensorBytes

__all__ = ["ExecutorchTarget"]


class ExecutorchTarget(Target):
    """The target for phones and tablets, through ExecuTorch."""

    name = "executorch"
    backends = ("xnnpack", "coreml", "vulkan")
    # torchao and ExecuTorch; the constants of a program in several forms; its cache in every method and pass.
    export_costs = ExportCosts(tools=140 * MIB, value=7.35, cache=24.5)

    def missing(self) -> str | None:
        from edgekit_executorch.versions import clash, versions

        return clash(versions())

    def capabilities(self, model: ModelSpec, recipe: Recipe, backend: str, context: int) -> Capabilities:
        from edgekit_executorch.capabilities import capabilities

        return capabilities(model, recipe, backend)

    def recipes(self, model: ModelSpec, device: DeviceProfile, backend: str) -> Iterable[Recipe]:
        from edgekit_executorch.offers import recipes

        return recipes(device, backend)

    def fitted(self, recipe: Recipe, model: ModelSpec) -> Recipe:
        """Return the recipe as it is: these programs look up no embedding in 4 bits."""
        return recipe

    def offer(self, model: ModelSpec, device: DeviceProfile, backend: str, recipe: Recipe) -> Offer:
        from edgekit_executorch.offers import offer

        return offer(model, device, backend, recipe)

    def memory(self, load: MemoryLoad) -> list[Term]:
        from edgekit_executorch.memory import memory_terms

        return memory_terms(load)

    def adapt(self, plan: Plan) -> Plan:
        """Return the plan as this machine can run it: with Python and torch, which a phone's app does without."""
        from edgekit_executorch.offers import on_this_machine

        return on_this_machine(plan)

    def export(self, plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
        from edgekit_executorch.export import export

        export(plan, weights, out, progress)

    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> Engine:
        self.check(plan)
        from edgekit_executorch.engine import ExecutorchEngine

        return ExecutorchEngine(plan, files, exact=exact)

    def weights(self, plan: Plan, files: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
        from edgekit_executorch.unpacked import weights

        return weights(plan, files)

    def kv_rounding(self, plan: Plan, kv_bits: int) -> KVRounding:
        from edgekit_executorch.int8_kv import rounded

        return lambda layer, kind, values: rounded(values, kv_bits)

    def tensor_places(self, files: Path) -> list[TensorBytes]:
        from edgekit_executorch.unpacked import tensor_places

        return tensor_places(files)
