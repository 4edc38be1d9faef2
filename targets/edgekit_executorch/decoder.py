"""The torch module that is lowered: a decoder built from the model's specification alone, with the cache inside.

Two entry points share weights and cache. `Append` appends to the cached tokens: a token's slot is its position; it also
returns the hidden states that a drafting head reads.
`StepForward` takes position, slot and mask from the host, for rings and trees. `rows` are the indices of the tokens
whose logits are computed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from edgekit.contracts.neutral import NeutralWeights
from edgekit.model.parts import Rope
from edgekit.model.rope import frequencies, rotated_pairs
from edgekit.model.spec import ModelSpec
from edgekit_executorch.attention import Attention, Places, attention_for
from edgekit_executorch.layer_tensors import head_dim_of, part_of, swap_of
from edgekit_executorch.linears import Arithmetic, RoundedLinear, embedding, fixed, linear

_GELU = (2 / math.pi) ** 0.5


class ExecutorchDecoder(nn.Module):
    """All layers, a cache of `slots` tokens (8-bit with `int8_kv`), and rotary tables of `positions` rows."""

    def __init__(
        self, weights: NeutralWeights, *, slots: int, positions: int, context: int, style: str = "fused",
        arithmetic: Arithmetic = "integers", int8_kv: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        spec = weights.model
        self.spec, self.slots, self.style = spec, slots, style
        self.embedding = embedding(weights, f"{spec.prefix}embed_tokens", arithmetic=arithmetic)
        self.ropes = nn.ModuleDict(
            {name: Rotary(rope, head_dim_of(spec, name), positions, context) for name, rope in spec.ropes.items()}
        )
        self.layers = nn.ModuleList(
            [
                Block(weights, index, slots=slots, style=style, arithmetic=arithmetic, int8_kv=int8_kv)
                for index in range(len(spec.layers))
            ]
        )
        self.norm = Norm(spec, weights.floats(f"{spec.prefix}norm.weight"))
        table = f"{spec.prefix}embed_tokens" if spec.tied else spec.head
        self.head = RoundedLinear(linear(weights, table, arithmetic=arithmetic))

    def leaving_after(self, layers: int) -> ExecutorchDecoder:
        """Return a decoder of the first `layers` layers, which it shares with this one."""
        shorter = copy.copy(self)
        shorter._modules = {**self._modules, "layers": self.layers[:layers]}
        return shorter

    def run(
        self, tokens: torch.Tensor, places: Places, rows: torch.Tensor, features: Sequence[int] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [rows, vocabulary] of tokens [1, count], and hidden states after the layers `features`."""
        hidden = self.embedding(tokens[0])
        hidden = scaled(hidden, self.spec.embedding_scale)
        rotations = {name: rope(places) for name, rope in self.ropes.items()}
        found = {}
        for count, (layer, block) in enumerate(zip(self.spec.layers, self.layers, strict=False), 1):
            hidden = block(hidden, places, None if layer.rope is None else rotations[layer.rope])
            if count in features:
                found[count] = hidden
        normed = scaled(self.norm(hidden.index_select(0, rows)), self.spec.logit_scale)
        logits: torch.Tensor = self.head(normed)[0]
        if self.spec.logit_softcap is not None:
            logits = torch.tanh(logits / self.spec.logit_softcap) * self.spec.logit_softcap
        return logits, *(found[layer] for layer in features)


class Append(nn.Module):
    """tokens [1, count], start [1], rows [r] → logits [r, vocabulary]: appends at `start`.

    Hidden states [count, width] after each of the layers `features` follow the logits.
    """

    def __init__(self, decoder: ExecutorchDecoder, features: Sequence[int] = ()) -> None:
        super().__init__()
        self.decoder, self.features = decoder, features

    def forward(
        self, tokens: torch.Tensor, start: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        count, slots = tokens.shape[1], self.decoder.slots
        fused = self.decoder.style == "fused"
        places = Places.after(start, count, slots) if fused else Places.following(start, count)
        found = self.decoder.run(tokens, places, rows, self.features)
        return found if self.features else found[0]


class StepForward(nn.Module):
    """tokens [1, count], positions [count], slots [count], rows [r], mask [count, slots] → logits [r, vocabulary].

    The mask is added to the scores: 0 where a slot is visible, -1e30 where not. A model with windowed layers also takes
    `near`, the mask of those layers.
    """

    def __init__(self, decoder: ExecutorchDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor,
        mask: torch.Tensor, near: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self.decoder.run(tokens, Places.chosen(positions, slots, mask, near), rows)[0]


class Norm(nn.Module):
    """The RMS norm. The offset of a stored weight is added when the module is built."""

    def __init__(self, spec: ModelSpec, weight: NDArray[np.float32]) -> None:
        super().__init__()
        self.epsilon = fixed(np.full(1, spec.norm_epsilon, np.float32))
        self.weight = fixed(weight + 1.0 if spec.norm_offset else weight)
        self.mean = fixed(np.full((1, weight.shape[-1]), 1.0 / weight.shape[-1], np.float32))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.unweighted(values) * self.weight

    def unweighted(self, values: torch.Tensor) -> torch.Tensor:
        # A mean as a product with constants: XNNPACK cannot lower a mean, which would split the layer into parts.
        squares = functional.linear(values * values, self.mean, self.epsilon)
        return values * torch.rsqrt(squares)


class Block(nn.Module):
    """One layer of the decoder."""

    def __init__(
        self, weights: NeutralWeights, index: int, *, slots: int, style: str, arithmetic: Arithmetic, int8_kv: bool
    ) -> None:
        super().__init__()
        self.spec, self.layer = weights.model, weights.model.layers[index]
        spec, name = self.spec, f"{self.spec.prefix}layers.{index}"

        def norm(which: str | None) -> nn.Module:
            return nn.Identity() if which is None else Norm(spec, weights.floats(f"{name}.{which}.weight"))

        def part(which: str) -> nn.Module:
            module, rows = part_of(spec, self.layer, which)
            return linear(weights, f"{name}.{module}", rows, arithmetic=arithmetic)

        self.attention: Attention = attention_for(spec, self.layer, slots, style, int8_kv=int8_kv)
        self.qkv = RoundedLinear(part("q"), part("k"), part("v"))
        self.output = RoundedLinear(part("o"))
        self.gate_up = RoundedLinear(part("gate"), part("up"))
        self.down = RoundedLinear(part("down"))
        self.before_attention, self.after_attention, self.before_feed, self.after_feed = map(norm, spec.layer_norms())
        self.query_norm = norm(spec.names.query_norm) if spec.qk_norm else nn.Identity()
        self.key_norm = norm(spec.names.key_norm) if spec.qk_norm else nn.Identity()

    def forward(self, hidden: torch.Tensor, places: Places, rotation: RopeSlice | None) -> torch.Tensor:
        attended = self.after_attention(self._attend(self.before_attention(hidden), places, rotation))
        hidden = hidden + scaled(attended, self.spec.residual_scale)
        fed = self.after_feed(self._feed(self.before_feed(hidden)))
        return hidden + scaled(fed, self.spec.residual_scale)

    def _attend(self, values: torch.Tensor, places: Places, rotation: RopeSlice | None) -> torch.Tensor:
        queries, keys, dim = self.spec.heads, self.layer.kv_heads, self.layer.head_dim
        query, key, value = self.qkv(values)
        # Views use -1 for the number of tokens, because a symbolic size is not lowered.
        of_queries, of_keys = self.spec.qk_norm_widths(self.layer)
        query = self._normed(self.query_norm, query.view(-1, of_queries)).view(-1, dim)
        key = self._normed(self.key_norm, key.view(-1, of_keys)).view(-1, dim)
        if rotation is not None:
            query, key = rotation.apply(query, queries), rotation.apply(key, keys)
        if self.spec.norms_after_rope:
            query = query.view(-1, dim)
            for norm in (self.query_norm, self.key_norm):
                assert isinstance(norm, Norm)
                query = query * norm.weight
        mixed: torch.Tensor = self.attention(
            query.view(1, -1, queries, dim), key.view(1, -1, keys, dim), value.view(1, -1, keys, dim), places
        )
        attended: torch.Tensor = self.output(mixed.view(-1, queries * dim))[0]
        return attended

    def _normed(self, norm: nn.Module, values: torch.Tensor) -> torch.Tensor:
        """Normalise queries or keys before the rope, without the weight of a norm that comes after it."""
        if isinstance(norm, Norm) and self.spec.norms_after_rope:
            return norm.unweighted(values)
        normed: torch.Tensor = norm(values)
        return normed

    def _feed(self, values: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(values)
        down: torch.Tensor = self.down(activate(self.spec, gate) * up)[0]
        return down


class Rotary(nn.Module):
    """One rope's tables for heads of `dim` channels; channels that are not rotated have cosine one and sine zero."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, rope: Rope, dim: int, positions: int, context: int) -> None:
        super().__init__()
        inverse, factor = frequencies(rope, context)
        first, second = rotated_pairs(rope)
        angles = np.arange(positions, dtype=np.float64)[:, None] * np.asarray(inverse, np.float64)
        cosine, sine = np.ones((positions, dim)), np.zeros((positions, dim))
        cosine[:, first] = cosine[:, second] = np.cos(angles) * factor
        sine[:, first], sine[:, second] = -np.sin(angles) * factor, np.sin(angles) * factor
        self.register_buffer("cosine", torch.from_numpy(cosine.astype(np.float32)).unsqueeze(1))
        self.register_buffer("sine", torch.from_numpy(sine.astype(np.float32)).unsqueeze(1))
        self.swap = fixed(swap_of(rope, dim))

    def forward(self, places: Places) -> RopeSlice:
        return RopeSlice(places.pick(self.cosine), places.pick(self.sine), self.swap)


class RopeSlice(NamedTuple):
    """The rows of a rope's tables for the positions of one call."""

    cosine: torch.Tensor  # [count, 1, dim]
    sine: torch.Tensor
    swap: torch.Tensor

    def apply(self, values: torch.Tensor, heads: int) -> torch.Tensor:
        """Rotate [count × heads, dim]. Pairs are swapped by a product, because XNNPACK does not lower slices."""
        dim = values.shape[-1]
        swapped = functional.linear(values, self.swap).view(-1, heads, dim)
        return values.view(-1, heads, dim) * self.cosine + swapped * self.sine


def scaled(values: torch.Tensor, scale: float) -> torch.Tensor:
    return values if scale == 1.0 else values * scale


def activate(spec: ModelSpec, values: torch.Tensor) -> torch.Tensor:
    match spec.activation:
        case "silu":
            return values * torch.sigmoid(values)
        case "gelu_tanh":
            # Written out, because XNNPACK lowers torch's tanh gelu as the exact gelu, which differs by 5e-4.
            return values * (0.5 + 0.5 * torch.tanh(values * (_GELU + _GELU * 0.044715 * values * values)))
        case "gelu":
            return functional.gelu(values)
        case "relu2":
            return functional.relu(values).square()
