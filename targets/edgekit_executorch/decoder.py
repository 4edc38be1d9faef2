"""The decoder that is lowered: every exported family, from its specification alone, with the cache inside.

Two ways in share weights and cache. `Forward` appends to what is held: the place in the cache is the position.
`Step` leaves position, place and mask to the host, for rings and trees. `rows` picks whose logits are computed.
Knows nothing of backends, files or how integers are stored.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from edgekit.model import ModelSpec, Rope
from edgekit.rope import frequencies
from edgekit.weights.neutral import NeutralWeights
from edgekit_executorch.attention import Attention, Places, attention_for
from edgekit_executorch.linears import Arithmetic, Rounded, embedding, fixed, linear
from edgekit_executorch.parts import head_dim_of, part_of, swap_of

_GELU = (2 / math.pi) ** 0.5


class Decoder(nn.Module):
    """All layers. `slots` tokens are held at most, `narrow` in 8 bits; the rotary tables reach `positions`."""

    def __init__(
        self, weights: NeutralWeights, *, slots: int, positions: int, context: int, style: str = "fused",
        arithmetic: Arithmetic = "integers", narrow: bool = False,
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
                Block(weights, index, slots=slots, style=style, arithmetic=arithmetic, narrow=narrow)
                for index in range(len(spec.layers))
            ]
        )
        self.norm = Norm(spec, weights.floats(f"{spec.prefix}norm.weight"))
        table = f"{spec.prefix}embed_tokens" if spec.tied else spec.head
        self.head = Rounded(linear(weights, table, arithmetic=arithmetic))

    def leaving_after(self, layers: int) -> Decoder:
        """The same without the layers that follow, whose weights a program would hold for nothing."""
        found = copy.copy(self)
        found._modules = {**self._modules, "layers": self.layers[:layers]}
        return found

    def run(self, tokens: torch.Tensor, places: Places, rows: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] of tokens [1, count]."""
        hidden = self.embedding(tokens[0])
        if self.spec.embedding_scale != 1.0:
            hidden = hidden * self.spec.embedding_scale
        turns = {name: rope(places) for name, rope in self.ropes.items()}
        for layer, block in zip(self.spec.layers, self.layers, strict=False):
            hidden = block(hidden, places, None if layer.rope is None else turns[layer.rope])
        logits: torch.Tensor = self.head(self.norm(hidden.index_select(0, rows)))[0]
        if self.spec.logit_softcap is not None:
            logits = torch.tanh(logits / self.spec.logit_softcap) * self.spec.logit_softcap
        return logits


class Forward(nn.Module):
    """tokens [1, count], start [1], rows [r] → logits [r, vocabulary]: appends at `start`, seeing all before it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: torch.Tensor, start: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        count, slots = tokens.shape[1], self.decoder.slots
        fused = self.decoder.style == "fused"
        places = Places.after(start, count, slots) if fused else Places.following(start, count)
        return self.decoder.run(tokens, places, rows)


class Step(nn.Module):
    """tokens [1, count], positions [count], slots [count], rows [r], mask [count, slots] → logits [r, vocabulary].

    The mask is added to the scores: 0 where a slot is seen, -1e30 where not. A model with windowed layers takes
    `near` as well: the same, for those layers.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor,
        mask: torch.Tensor, near: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return self.decoder.run(tokens, Places.chosen(positions, slots, mask, near), rows)


class Norm(nn.Module):
    """The root mean square norm; an offset in the stored weight is added once, here."""

    def __init__(self, spec: ModelSpec, weight: NDArray[np.float32]) -> None:
        super().__init__()
        self.epsilon = fixed(np.full(1, spec.norm_epsilon, np.float32))
        self.weight = fixed(weight + 1.0 if spec.norm_offset else weight)
        self.mean = fixed(np.full((1, weight.shape[-1]), 1.0 / weight.shape[-1], np.float32))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        # A product with constants is lowered where a mean is not, and so a layer stays in one piece.
        squares = functional.linear(values * values, self.mean, self.epsilon)
        found: torch.Tensor = values * torch.rsqrt(squares) * self.weight
        return found


class Block(nn.Module):
    """One layer."""

    def __init__(
        self, weights: NeutralWeights, index: int, *, slots: int, style: str, arithmetic: Arithmetic, narrow: bool
    ) -> None:
        super().__init__()
        self.spec, self.layer = weights.model, weights.model.layers[index]
        spec, name = self.spec, f"{self.spec.prefix}layers.{index}"

        def norm(which: str) -> Norm:
            return Norm(spec, weights.floats(f"{name}.{which}.weight"))

        def part(which: str) -> nn.Module:
            module, rows = part_of(spec, self.layer, which)
            return linear(weights, f"{name}.{module}", rows, arithmetic=arithmetic)

        self.attention: Attention = attention_for(spec, self.layer, slots, style, narrow=narrow)
        self.qkv = Rounded(part("q"), part("k"), part("v"))
        self.output = Rounded(part("o"))
        self.gate_up = Rounded(part("gate"), part("up"))
        self.down = Rounded(part("down"))
        self.before_attention = norm("input_layernorm")
        after = norm("post_attention_layernorm")
        self.after_attention = after if spec.post_norms else nn.Identity()
        self.before_feed = norm("pre_feedforward_layernorm") if spec.post_norms else after
        self.after_feed = norm("post_feedforward_layernorm") if spec.post_norms else nn.Identity()
        self.query_norm = norm("self_attn.q_norm") if spec.qk_norm else nn.Identity()
        self.key_norm = norm("self_attn.k_norm") if spec.qk_norm else nn.Identity()

    def forward(self, hidden: torch.Tensor, places: Places, turn: Turn | None) -> torch.Tensor:
        hidden = hidden + self.after_attention(self._attend(self.before_attention(hidden), places, turn))
        fed: torch.Tensor = self.after_feed(self._feed(self.before_feed(hidden)))
        return hidden + fed

    def _attend(self, values: torch.Tensor, places: Places, turn: Turn | None) -> torch.Tensor:
        queries, keys, dim = self.spec.heads, self.layer.kv_heads, self.layer.head_dim
        query, key, value = self.qkv(values)
        # Views name the count of tokens as -1: a size that is not a number would not be lowered.
        query, key = self.query_norm(query.view(-1, dim)), self.key_norm(key.view(-1, dim))
        if turn is not None:
            query, key = turn.apply(query, queries), turn.apply(key, keys)
        mixed: torch.Tensor = self.attention(
            query.view(1, -1, queries, dim), key.view(1, -1, keys, dim), value.view(1, -1, keys, dim), places
        )
        found: torch.Tensor = self.output(mixed.view(-1, queries * dim))[0]
        return found

    def _feed(self, values: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(values)
        found: torch.Tensor = self.down(activate(self.spec, gate) * up)[0]
        return found


class Rotary(nn.Module):
    """One rope's tables for heads of `dim` values; what does not turn has cosine one and sine zero."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, rope: Rope, dim: int, positions: int, context: int) -> None:
        super().__init__()
        inverse, factor = frequencies(rope, context)
        half = len(inverse)
        angles = np.arange(positions, dtype=np.float64)[:, None] * np.asarray(inverse, np.float64)
        cosine, sine = np.ones((positions, dim)), np.zeros((positions, dim))
        cosine[:, : 2 * half] = np.tile(np.cos(angles) * factor, 2)
        sine[:, :half], sine[:, half : 2 * half] = -np.sin(angles) * factor, np.sin(angles) * factor
        self.register_buffer("cosine", torch.from_numpy(cosine.astype(np.float32)).unsqueeze(1))
        self.register_buffer("sine", torch.from_numpy(sine.astype(np.float32)).unsqueeze(1))
        self.swap = fixed(swap_of(dim, 2 * half))

    def forward(self, places: Places) -> Turn:
        return Turn(places.pick(self.cosine), places.pick(self.sine), self.swap)


class Turn(NamedTuple):
    """A rope at the positions of one call."""

    cosine: torch.Tensor  # [count, 1, dim]
    sine: torch.Tensor
    swap: torch.Tensor

    def apply(self, values: torch.Tensor, heads: int) -> torch.Tensor:
        """Turn [count × heads, dim]. The halves change places by a product, which is lowered where slices are not."""
        dim = values.shape[-1]
        swapped = functional.linear(values, self.swap).view(-1, heads, dim)
        return values.view(-1, heads, dim) * self.cosine + swapped * self.sine


def activate(spec: ModelSpec, values: torch.Tensor) -> torch.Tensor:
    match spec.activation:
        case "silu":
            return values * torch.sigmoid(values)
        case "gelu_tanh":
            # Spelled out: XNNPACK lowers this kind as the other one, and is 5e-4 off.
            return values * (0.5 + 0.5 * torch.tanh(values * (_GELU + _GELU * 0.044715 * values * values)))
        case "gelu":
            return functional.gelu(values)
        case "relu2":
            return functional.relu(values).square()
