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
from edgekit.model import decoder
from edgekit.model.parts import Rope
from edgekit.model.rope import frequencies, rotated_pairs
from edgekit.model.spec import ModelSpec
from edgekit_executorch.attention import Attention, Places, attention_for
from edgekit_executorch.layer_tensors import head_dim_of, norms_of, swap_of
from edgekit_executorch.linears import Arithmetic, RoundedLinear, embedding, fixed, linear

_GELU = (2 / math.pi) ** 0.5


class ExecutorchDecoder(nn.Module):
    """All layers, a cache of `slots` tokens (8-bit with `int8_kv`), and rotary tables for them and for `context`."""

    def __init__(
        self, weights: NeutralWeights, *, slots: int, context: int, style: str = "fused",
        arithmetic: Arithmetic = "integers", int8_kv: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        spec = weights.model
        self.spec, self.slots, self.style = spec, slots, style
        self.embedding = embedding(weights, f"{spec.prefix}embed_tokens", arithmetic=arithmetic)
        positions = max(context, slots)
        self.ropes = nn.ModuleDict(
            {name: Rotary(rope, head_dim_of(spec, name), positions, context) for name, rope in spec.ropes.items()}
        )
        self.layers = nn.ModuleList(
            [
                Block(weights, index, slots=slots, style=style, arithmetic=arithmetic, int8_kv=int8_kv)
                for index in range(len(spec.layers))
            ]
        )
        self.norms = nn.ModuleDict({"norm": Norm(spec, weights.floats(f"{spec.prefix}norm.weight"))})
        table = f"{spec.prefix}embed_tokens" if spec.tied else spec.head
        self.linears = nn.ModuleDict({decoder.HEAD: RoundedLinear(linear(weights, table, arithmetic=arithmetic))})

    def leaving_after(self, layers: int) -> ExecutorchDecoder:
        """Return a decoder of the first `layers` layers, which it shares with this one."""
        shorter = copy.copy(self)
        shorter._modules = {**self._modules, "layers": self.layers[:layers]}
        return shorter

    def run(
        self, tokens: torch.Tensor, places: Places, rows: torch.Tensor, features: Sequence[int] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [rows, vocabulary] of tokens [1, count], and hidden states after the layers `features`."""
        hidden = BlockOps(self).scale(self.embedding(tokens[0]), self.spec.embedding_scale)
        rotations = {name: rope(places) for name, rope in self.ropes.items()}
        found = {}
        for count, (layer, block) in enumerate(zip(self.spec.layers, self.layers, strict=False), 1):
            hidden = block(hidden, places, None if layer.rope is None else rotations[layer.rope])
            if count in features:
                found[count] = hidden
        logits = decoder.head(self.spec, BlockOps(self), hidden.index_select(0, rows))
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
    """The norm. The offset of a stored weight is added when the module is built."""

    def __init__(self, spec: ModelSpec, weight: NDArray[np.float32]) -> None:
        super().__init__()
        self.centred, self.epsilon = spec.centred_norms, fixed(np.full(1, spec.norm_epsilon, np.float32))
        self.weight = fixed(weight + 1.0 if spec.norm_offset else weight)
        self.mean = fixed(np.full((1, weight.shape[-1]), 1.0 / weight.shape[-1], np.float32))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.unweighted(values) * self.weight

    def unweighted(self, values: torch.Tensor) -> torch.Tensor:
        # A mean as a product with constants: XNNPACK cannot lower a mean, which would split the layer into parts.
        if self.centred:
            values = values - functional.linear(values, self.mean)
        squares = functional.linear(values * values, self.mean, self.epsilon)
        return values * torch.rsqrt(squares)


class Block(nn.Module):
    """One layer of the decoder: its cache, linears and norms."""

    def __init__(
        self, weights: NeutralWeights, index: int, *, slots: int, style: str, arithmetic: Arithmetic, int8_kv: bool
    ) -> None:
        super().__init__()
        self.spec, self.index = weights.model, index
        self.layer, name = self.spec.layers[index], f"{self.spec.prefix}layers.{index}"
        self.attention: Attention = attention_for(self.spec, self.layer, slots, style, int8_kv=int8_kv)
        self.linears = nn.ModuleDict(
            {
                _key(parts[0].name): RoundedLinear(
                    *(linear(weights, f"{name}.{part.module}", part.rows, arithmetic=arithmetic) for part in parts)
                )
                for parts in decoder.linears(self.spec, self.layer)
            }
        )
        self.norms = nn.ModuleDict(
            {_key(norm): Norm(self.spec, weights.floats(f"{name}.{norm}.weight")) for norm in norms_of(self.spec)}
        )

    def forward(self, hidden: torch.Tensor, places: Places, rotation: RopeSlice | None) -> torch.Tensor:
        hidden, delta = decoder.layer(self.spec, self.index, BlockOps(self, places, rotation), hidden)
        return hidden if delta is None else hidden + delta


class BlockOps(decoder.Ops[torch.Tensor]):
    """The operations of a layer, or of the head, on tokens [count, width], as they are traced.

    Views use -1 for the number of tokens, because a symbolic size is not lowered.
    """

    def __init__(
        self, block: Block | ExecutorchDecoder, places: Places | None = None, rotation: RopeSlice | None = None
    ) -> None:
        self._block, self._places, self._rotation = block, places, rotation

    def linear(self, x: torch.Tensor, module: str) -> torch.Tensor:
        outputs: torch.Tensor = self._block.linears[_key(module)](x)[0]
        return outputs

    def products(
        self, x: torch.Tensor, parts: Sequence[decoder.Projection], *, may_join: bool = False
    ) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = self._block.linears[_key(parts[0].name)](x)
        return outputs

    def norm(self, x: torch.Tensor, name: str | None, heads: tuple[int, int] | None = None) -> torch.Tensor:
        rows = x if heads is None else x.view(-1, heads[1])
        norm = self._norm(name or self._block.spec.names.query_norm)
        normed: torch.Tensor = norm.unweighted(rows) if name is None else norm(rows)
        return normed

    def activate(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        return activate(x, kind)

    def softcap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return torch.tanh(x / cap) * cap

    def attend(self, parts: Sequence[torch.Tensor], late_norms: Sequence[str]) -> torch.Tensor:
        assert isinstance(self._block, Block) and self._places is not None, "a layer attends"
        layer, heads = self._block.layer, self._block.spec.heads
        queries, keys, dim = heads, layer.kv_heads, layer.head_dim
        query, key, value = parts
        query, key = query.view(-1, dim), key.view(-1, dim)
        if self._rotation is not None:
            query, key = self._rotation.apply(query, queries), self._rotation.apply(key, keys)
        for name in late_norms:
            query = query.view(-1, dim) * self._norm(name).weight
        mixed: torch.Tensor = self._block.attention(
            query.view(1, -1, queries, dim), key.view(1, -1, keys, dim), value.view(1, -1, keys, dim), self._places
        )
        return mixed.view(-1, queries * dim)

    def _norm(self, name: str) -> Norm:
        norm = self._block.norms[_key(name)]
        assert isinstance(norm, Norm)
        return norm


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


def activate(values: torch.Tensor, kind: str) -> torch.Tensor:
    match kind:
        case "silu":
            return values * torch.sigmoid(values)
        case "gelu_tanh":
            # Written out, because XNNPACK lowers torch's tanh gelu as the exact gelu, which differs by 5e-4.
            return values * (0.5 + 0.5 * torch.tanh(values * (_GELU + _GELU * 0.044715 * values * values)))
        case "gelu":
            return functional.gelu(values)
        case "relu2":
            return functional.relu(values).square()
    assert kind == "sigmoid", kind
    return torch.sigmoid(values)


def _key(name: str) -> str:
    """Return the name of a linear or norm as torch's modules may have it."""
    return name.replace(".", "_")
