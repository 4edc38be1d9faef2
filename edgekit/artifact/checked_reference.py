"""The reference of the self-check: the reference decoder, with the rounding of an engine where that is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from edgekit.artifact.read_back import StoredWeights
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.contracts.target import Target
from edgekit.errors import InvalidInput
from edgekit.quant.reference_decoder import ignore, logits

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Observe = Callable[[str, torch.Tensor], None]


def reference_logits(
    weights: NeutralWeights | StoredWeights,
    plan: Plan,
    tokens: Sequence[int],
    observe: Observe | None = None,
    observe_cache: Observe | None = None,
) -> NDArray[np.float32] | None:
    """Return the reference decoder's logits; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    computed = logits(
        plan.model,
        lambda name: torch.from_numpy(weights.tensor(name)),
        list(tokens),
        context_tokens=plan.context,
        get_rows=lambda name, rows: torch.from_numpy(weights.dequantised(name.removesuffix(".weight"), rows)),
        observe=observe or ignore,
        observe_cache=observe_cache or ignore,
    )
    weights.release()
    values: NDArray[np.float32] = computed.numpy()
    return values


class Again(NamedTuple):
    """Runs the reference again, with rounding. `source`: the weights that it computes with."""

    target: Target
    plan: Plan
    weights: NeutralWeights
    source: NeutralWeights | StoredWeights
    tokens: Sequence[int]

    @property
    def rounds_kv(self) -> bool:
        """Whether the target says how it rounds keys and values."""
        return self.target.kv_rounding(self.plan, 8) is not None

    def logits(self, *, kv_bits: int = 32, int8_inputs: bool = False) -> NDArray[np.float32]:
        """Return the reference's logits with keys and values of `kv_bits` bits.

        `int8_inputs`: also with the input of every linear in 8 bits, as the target rounds them or, where it does not
        say, token by token.
        """
        observe = self._to_int8() if int8_inputs else None
        cache = self._cache(kv_bits) if self.rounds_kv and kv_bits < 32 else None
        found = reference_logits(self.source, self.plan, self.tokens, observe, cache)
        assert found is not None, "it ran before"
        return found

    def _to_int8(self) -> Observe:
        from torch.nn.functional import pad

        blocks = self.target.input_blocks(self.plan, self.weights)

        def observe(name: str, inputs: torch.Tensor) -> None:
            block = None if blocks is None else blocks.get(name, 0)
            if block is None:
                low, high = inputs.amin(-1, keepdim=True).clamp(max=0), inputs.amax(-1, keepdim=True).clamp(min=0)
                scale = ((high - low) / 255).clamp(min=1e-12)
                inputs.div_(scale).round_().mul_(scale)
            elif block:
                width = inputs.shape[-1]
                padded = pad(inputs, (0, -width % block))
                grouped = padded.reshape(*inputs.shape[:-1], -1, block)
                scale = (grouped.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
                inputs.copy_((grouped / scale).round_().mul_(scale).flatten(-2)[..., :width])

        return observe

    def _cache(self, kv_bits: int) -> Observe:
        import torch

        round_kv = self.target.kv_rounding(self.plan, kv_bits)
        assert round_kv is not None

        def observe(name: str, values: torch.Tensor) -> None:
            *_, layer, kind = name.split(".")
            values[0] = torch.from_numpy(round_kv(int(layer), kind, values[0].contiguous().numpy()))

        return observe


def check_varied(plan: Plan, logits: NDArray[np.float32]) -> None:
    """Raise `InvalidInput` if the model predicts nothing: logits that are not finite, or the same for all tokens."""
    import numpy as np

    if not np.isfinite(logits).all():
        raise InvalidInput(f"{plan.model_source}: the model's logits are not finite; its weights are damaged")
    least = 1e-6 * np.abs(logits).max()
    if np.ptp(logits, axis=1).max() <= least or (len(logits) > 1 and np.ptp(logits, axis=0).max() <= least):
        raise InvalidInput(
            f"{plan.model_source}: the model's logits do not vary with its tokens; its weights are damaged or all zero"
        )
