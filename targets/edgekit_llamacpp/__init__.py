"""The llamacpp target: one GGUF file, run by llama.cpp's C library. Importing it imports no vendor library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.common.progress import Progress
from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.engine import Engine
from edgekit.contracts.memory import ExportCosts, MemoryLoad, Term
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import GGUF_BLOCKS, Recipe
from edgekit.contracts.target import KVRounding, Offer, Target
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.neutral import NeutralWeights

__all__ = ["LlamaCppTarget"]


class LlamaCppTarget(Target):
    """The target for CPUs on Linux and macOS, and for GPUs that the library was built for.

    Running needs llama.cpp, exporting does not.
    """

    name = "llamacpp"
    backends = ("cpu", "metal", "cuda", "vulkan")
    export_costs = ExportCosts(tokenizer=2.4, vocabulary=0.8)  # as JSON and as metadata, which are compared

    def missing(self) -> str | None:
        from edgekit_llamacpp.library import missing

        return missing()

    def missing_to_export(self) -> str | None:
        """Return None: the file is written without llama.cpp."""

    def capabilities(self, model: ModelSpec, recipe: Recipe, backend: str, context: int) -> Capabilities:
        from edgekit_llamacpp.capabilities import capabilities

        return capabilities(model, recipe, backend, context)

    def recipes(self, model: ModelSpec, device: DeviceProfile, backend: str) -> Iterable[Recipe]:
        from edgekit_llamacpp.offers import recipes

        return recipes()

    def fitted(self, recipe: Recipe, model: ModelSpec) -> Recipe:
        """Return llama.cpp's own mixtures with the rules of the model's layers."""
        from edgekit.quant.gguf_mixtures import mixture_of

        own = mixture_of(model, recipe)
        return super().fitted(recipe, model) if own is recipe else own

    def offer(self, model: ModelSpec, device: DeviceProfile, backend: str, recipe: Recipe) -> Offer:
        from edgekit_llamacpp.offers import offer

        return offer(model, device, backend, recipe)

    def memory(self, load: MemoryLoad) -> list[Term]:
        from edgekit_llamacpp.memory import memory_terms

        return memory_terms(load)

    def adapt(self, plan: Plan) -> Plan:
        """Return the plan as the library can run it here: without layers on a GPU where it has none."""
        from edgekit_llamacpp.devices import on_this_machine
        from edgekit_llamacpp.library import load

        return on_this_machine(load(), plan)[0] if plan.gpu_layers else plan

    def devices(self) -> list[str]:
        """Describe every device that the library sees."""
        from edgekit_llamacpp.devices import described
        from edgekit_llamacpp.library import load

        return described(load())

    def export(self, plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
        from edgekit_llamacpp.export import export

        export(plan, weights, out, progress)

    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> Engine:
        self.check(plan)
        from edgekit_llamacpp.engine import LlamaCppEngine

        return LlamaCppEngine(plan, files, exact=exact)

    def weights(self, plan: Plan, files: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Read the tensors back with the reader of GGUF models, not with the exporter's code."""
        from edgekit.contracts.neutral import on_disk
        from edgekit.model.gguf_source import open_gguf_tensors
        from edgekit_llamacpp.layout import WEIGHTS

        with open_gguf_tensors(files / WEIGHTS, with_second_table=True) as stored:
            for tensor in plan.model.tensors():
                name = on_disk(plan.model, tensor.name)
                yield tensor.name, stored.floats(name)
                stored.release(name)

    def input_blocks(self, plan: Plan, weights: NeutralWeights) -> dict[str, int]:
        tensors = [weights.tensor_of(module) for module in weights.modules()]
        kinds = {each.module: plan.recipe.format_of(each).fitted(each.shape[1]).kind for each in tensors}
        return {module: GGUF_BLOCKS.get(kind, (32, 0))[0] for module, kind in kinds.items()}

    def kv_rounding(self, plan: Plan, kv_bits: int) -> KVRounding:
        from edgekit_llamacpp.kv_blob import rounded

        return lambda layer, kind, values: rounded(plan.model, kv_bits, kind, values)
