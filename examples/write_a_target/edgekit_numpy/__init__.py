"""The numpy target: Llama models on any CPU, in plain numpy. An example to copy; it is not fast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.common.progress import Progress
from edgekit.contracts.capabilities import Capabilities
from edgekit.contracts.device import DeviceProfile
from edgekit.contracts.engine import Engine
from edgekit.contracts.memory import MemoryLoad, Term, usual_terms
from edgekit.contracts.plan import MemoryFacts, Plan, SpeedFacts
from edgekit.contracts.recipe import RECIPES, Recipe, weight_bytes
from edgekit.contracts.target import Offer, Target
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.neutral import NeutralWeights

__all__ = ["NumpyTarget"]

_RUNTIME_BYTES = 32 << 20
_SPEED = SpeedFacts(
    bandwidth_share=0.07,
    prefill_shares=(("fp32", 0.5),),
    source="measured with the bundled demo model on two busy x86-64 cores: 35 tokens/s at 6.6 GB/s, "
    "prefill at 437 tokens/s",
)


class NumpyTarget(Target):
    """Llama models on CPUs. The methods import their modules late, so that importing the target stays light."""

    name = "numpy"
    backends = ("cpu",)

    def missing(self) -> str | None:
        """Nothing can be missing: edgekit itself needs numpy."""
        return None

    def capabilities(self, model: ModelSpec, recipe: Recipe, backend: str, context: int) -> Capabilities:
        """What the engine can do: windows, but no exits, adapters, or windows that keep tokens by a score."""
        return able(model)

    def recipes(self, model: ModelSpec, device: DeviceProfile, backend: str) -> Iterable[Recipe]:
        return RECIPES["float32"], RECIPES["s8"]

    def offer(self, model: ModelSpec, device: DeviceProfile, backend: str, recipe: Recipe) -> Offer:
        return Offer(
            target=self.name,
            backend=backend,
            recipe=recipe,
            capabilities=able(model),
            memory=MemoryFacts(
                runtime_bytes=_RUNTIME_BYTES,
                scale_bits=32,
                float_bits=32,
                source="weights: their size in float32; interpreter, numpy and tokenizer: private memory of a process "
                "on x86-64 Linux with the bundled demo model, less its weights",
            ),
            speed=_SPEED,
        )

    def memory(self, load: MemoryLoad) -> Iterable[Term]:
        """Weights are expanded to float32 when an artifact is opened: 8-bit integers take four times their size."""
        copied = weight_bytes(load.model, RECIPES["float32"]) / weight_bytes(load.model, load.recipe)
        return usual_terms(load, load.weights(copied=copied))

    def export(self, plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
        from edgekit_numpy.files import write_weights

        write_weights(plan.model, weights, out, progress)

    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> Engine:
        self.check(plan)
        from edgekit_numpy.engine import NumpyEngine

        return NumpyEngine(plan, files, exact=exact)

    def weights(self, plan: Plan, files: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
        from edgekit_numpy.files import read_weights

        return read_weights(plan, files)


def able(model: ModelSpec) -> Capabilities:
    """Return what the engine can do with a model; an open engine narrows it to its artifact."""
    return Capabilities(vocabulary=model.vocab_size, kv_bits=(32,), refusal=unsupported(model), exact="on_request")


def unsupported(model: ModelSpec) -> str | None:
    """Return why the decoder cannot run `model`, with what to do instead; None when it can."""
    if model.family != "llama" or model.activation != "silu" or model.qkv_bias or model.output_bias or model.mlp_bias:
        return f"the numpy target runs plain Llama models, not {model.family} with its extras; use another target"
    return None
