"""The onnx target: a graph written directly for plain ONNX Runtime, on the CPU or on CUDA.

Importing this package imports no vendor library; each method imports what it needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.common.packages import UNREPORTED, version_of
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
from edgekit_onnx.layout import COPIED_SHARE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.neutral import NeutralWeights
    from edgekit.formats.safetensors import TensorBytes

__all__ = ["OnnxTarget"]

for _name, _value in UNREPORTED.items():
    os.environ.setdefault(_name, _value)


class OnnxTarget(Target):
    """The target for CPUs and NVIDIA GPUs, through onnxruntime."""

    name = "onnx"
    backends = ("cpu", "cuda")
    export_costs = ExportCosts(tools=45 * MIB)  # onnxruntime and onnx_ir
    copied_share = COPIED_SHARE

    def missing(self) -> str | None:
        installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if version_of(name)]
        if not installed:
            return "onnxruntime is not installed; pip install 'edgekit[onnx]' (or 'edgekit[cuda]' for an NVIDIA GPU)"
        if len(installed) == 2:
            return (
                "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files; "
                "pip uninstall both, then install one"
            )
        if find_spec("onnxruntime") is None:
            return f"{installed[0]} is registered but cannot be imported; pip install --force-reinstall {installed[0]}"
        return None

    def capabilities(self, model: ModelSpec, recipe: Recipe, backend: str, context: int) -> Capabilities:
        from edgekit_onnx.capabilities import capabilities

        return capabilities(model, recipe, backend)

    def recipes(self, model: ModelSpec, device: DeviceProfile, backend: str) -> Iterable[Recipe]:
        from edgekit_onnx.offers import recipes

        return recipes(model, backend)

    def offer(self, model: ModelSpec, device: DeviceProfile, backend: str, recipe: Recipe) -> Offer:
        from edgekit_onnx.offers import offer

        return offer(model, device, backend, recipe)

    def memory(self, load: MemoryLoad) -> list[Term]:
        from edgekit_onnx.memory import memory_terms

        return memory_terms(load)

    def adapt(self, plan: Plan) -> Plan:
        """Return the plan with the memory of edgekit's own operators where they are compiled, and without elsewhere."""
        from edgekit_onnx.memory import OWN_LAYOUT
        from edgekit_onnx.product_kernels import product_kernels

        layout = OWN_LAYOUT if plan.backend == "cpu" and product_kernels() is not None else None
        return plan.model_copy(update={"memory": plan.memory.model_copy(update={"layout": layout})})

    def export(self, plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
        from edgekit_onnx.export import export

        export(plan, weights, out, progress)

    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> Engine:
        self.check(plan)
        if plan.model.encoder:
            from edgekit_onnx.encoder import OnnxEncoder

            return OnnxEncoder(plan, files)
        from edgekit_onnx.engine import OnnxEngine

        return OnnxEngine(plan, files, exact=exact)

    def input_blocks(self, plan: Plan, weights: NeutralWeights) -> dict[str, int]:
        from edgekit_onnx.packing import input_blocks

        return input_blocks(weights)

    def kv_rounding(self, plan: Plan, kv_bits: int) -> KVRounding:
        from edgekit_onnx.int8_kv import rounded

        return partial(rounded, plan.model, kv_bits)

    def tensor_places(self, files: Path) -> list[TensorBytes]:
        from edgekit_onnx.unpacked import tensor_places

        return tensor_places(files)

    def weights(self, plan: Plan, files: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
        from edgekit_onnx.unpacked import weights

        return weights(plan, files)
