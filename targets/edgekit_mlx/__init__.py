"""The mlx target: Apple silicon through MLX, and Linux CPUs for checks. Importing it imports no vendor library."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.common.packages import version_of
from edgekit.common.progress import Progress
from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.engine import Engine
from edgekit.contracts.memory import MemoryLoad, Term
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.target import KVRounding, Offer, Target
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.neutral import NeutralWeights

__all__ = ["MlxTarget"]

# Packages with MLX's kernels for Linux, without which `mlx` cannot be imported there.
_LINUX_KERNELS = ("mlx-cpu", "mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")


class MlxTarget(Target):
    """The target for Macs, iPhones and iPads. Running needs mlx, exporting does not."""

    name = "mlx"
    backends = ("metal", "cpu")

    def missing(self) -> str | None:
        system, machine = platform.system(), platform.machine()
        if system not in ("Darwin", "Linux") or (system == "Darwin" and machine != "arm64"):
            return f"MLX runs on Apple silicon and on Linux, not on {system} {machine}; use --target onnx here"
        if find_spec("mlx") is None:
            return "mlx is not installed; pip install 'edgekit[mlx]'"
        if system == "Linux" and not any(version_of(name) for name in _LINUX_KERNELS):
            return "mlx is installed without its CPU kernels; pip install 'edgekit[mlx]'"
        return None

    def missing_to_export(self) -> str | None:
        """Return None: the files are written without mlx."""

    def capabilities(self, model: ModelSpec, recipe: Recipe, backend: str, context: int) -> Capabilities:
        from edgekit_mlx.capabilities import capabilities

        return capabilities(model, on_metal=backend == "metal")

    def recipes(self, model: ModelSpec, device: DeviceProfile, backend: str) -> Iterable[Recipe]:
        from edgekit_mlx.offers import recipes

        return recipes(backend)

    def offer(self, model: ModelSpec, device: DeviceProfile, backend: str, recipe: Recipe) -> Offer:
        from edgekit_mlx.offers import offer

        return offer(model, backend, recipe)

    def memory(self, load: MemoryLoad) -> list[Term]:
        from edgekit_mlx.memory import memory_terms

        return memory_terms(load)

    def adapt(self, plan: Plan) -> Plan:
        """Return the plan as this machine can run it: a plan for Metal runs on the CPU where there is no Metal."""
        from edgekit_mlx.offers import on_this_machine

        return on_this_machine(plan, has_metal=platform.system() == "Darwin")

    def export(self, plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
        from edgekit_mlx.export import export

        export(plan, weights, out, progress)

    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> Engine:
        from edgekit.errors import TargetMissing

        missing = self.missing()
        if missing:
            raise TargetMissing(missing)
        self.check(plan)
        from edgekit_mlx.engine import MlxEngine

        return MlxEngine(plan, files, exact=exact)

    def weights(self, plan: Plan, files: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
        from edgekit_mlx.unpacked import weights

        return weights(plan, files)

    def input_blocks(self, plan: Plan, weights: NeutralWeights) -> dict[str, int]:
        return {}

    def kv_rounding(self, plan: Plan, kv_bits: int) -> KVRounding:
        from edgekit_mlx.kv_cache import rounded

        return lambda layer, kind, values: rounded(values, kv_bits)
