"""The llamacpp target: one GGUF file, run by llama.cpp's C library. Importing it imports no vendor library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.common.progress import Progress
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.engine import Engine
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.target import Offer
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.neutral import NeutralWeights

__all__ = ["LlamaCppTarget"]


class LlamaCppTarget:
    """The target for CPUs on Linux and macOS. Running needs llama.cpp, exporting does not."""

    name = "llamacpp"

    def missing(self) -> str | None:
        from edgekit_llamacpp.library import missing

        return missing()

    def missing_to_export(self) -> str | None:
        """Return None: the file is written without llama.cpp."""

    def offers(self, model: ModelSpec, device: DeviceProfile) -> Iterable[Offer]:
        from edgekit_llamacpp.offers import offers

        return offers(model, device)

    def offer_in(self, model: ModelSpec, device: DeviceProfile, backend: str, recipe: Recipe) -> Offer:
        from edgekit_llamacpp.offers import offer

        return offer(model, device, backend, recipe)

    def export(self, plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
        from edgekit_llamacpp.export import export

        export(plan, weights, out, progress)

    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> Engine:
        from edgekit_llamacpp.engine import LlamaCppEngine

        return LlamaCppEngine(plan, files, exact=exact)

    def weights(self, plan: Plan, files: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
        from edgekit_llamacpp.unpacked import weights

        return weights(plan, files)
