"""Attention over the cache, and the slots that new tokens are written to.

`Fused` is ExecuTorch's own operator, whose cost grows with the cached tokens. It has no soft cap; with one, `Plain`
computes attention step by step over all slots. `Scattered` uses none of ExecuTorch's operators. Each stores keys and
values as [1, slot, head, dim], the layout that a host sees. An 8-bit cache has a scale and a zero point for each token
of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from edgekit.model.parts import Layer
from edgekit.model.spec import ModelSpec

_INT8 = (-128, 127, torch.int8)
MASKED = -1e30  # finite, so that the scores of a fully masked block do not become NaN


class Places(NamedTuple):
    """Positions, slots and masks of the new tokens. `start` is set if they follow the cached tokens.

    Layers share the masks that are made for them, by cache size and window: one of each layer's own took 491 MiB in a
    program of Gemma 3 for 8,192 tokens.
    """

    positions: torch.Tensor
    start: int | None
    slots: torch.Tensor
    made: dict[tuple[int, int | None], torch.Tensor]
    mask: torch.Tensor | None = None
    near: torch.Tensor | None = None

    @staticmethod
    def after(start: torch.Tensor, count: int, slots: int) -> Places:
        """Append to the cached tokens; `start` becomes a number."""
        first: int = start.item()  # type: ignore[assignment]  # a symbol while tracing, which int() would evaluate
        torch._check(first >= 0)  # type: ignore[no-untyped-call]
        torch._check(first + count <= slots)  # type: ignore[no-untyped-call]
        positions = torch.arange(count) + start
        return Places(positions, first, positions, {})

    @staticmethod
    def following(start: torch.Tensor, count: int) -> Places:
        """Append to the cached tokens, for backends that take only tensors."""
        positions = torch.arange(count) + start
        return Places(positions, None, positions, {})

    @staticmethod
    def chosen(positions: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, near: torch.Tensor | None) -> Places:
        """Use positions, slots and masks that the host chose; `near` is the mask of windowed layers."""
        return Places(positions, None, slots, {}, mask, near)

    def pick(self, table: torch.Tensor) -> torch.Tensor:
        """Return the rows of a table at these positions."""
        if self.start is None:
            return table.index_select(0, self.positions)
        return table.narrow(0, self.start, self.positions.shape[0])

    def mask_of(self, slots: int, window: int | None) -> torch.Tensor:
        """Return the mask [count, slots] to add to the scores of a layer with this window."""
        if self.mask is not None:
            mask = self.mask if window is None else self.near
            assert mask is not None, "a windowed layer needs a mask of its own"
            return mask
        if (slots, window) not in self.made:
            distance = self.positions.to(torch.int32)[:, None] - torch.arange(slots, dtype=torch.int32)[None]
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            self.made[slots, window] = hidden.float() * MASKED
        return self.made[slots, window]


class Attention(nn.Module):
    """Base of attention: the cache of one layer."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, spec: ModelSpec, layer: Layer, slots: int, *, int8_kv: bool = False) -> None:
        super().__init__()
        self.scale, self.softcap, self.slots = spec.attention_scale, spec.attention_softcap, slots
        self.window = layer.window if layer.window is not None and layer.window < slots else None
        self.int8_kv = int8_kv
        shape = (1, slots, layer.kv_heads)
        for name in ("keys", "values"):
            self._allocate(name, (*shape, layer.head_dim), torch.int8 if int8_kv else torch.float32)
            if int8_kv:
                self._allocate(f"{name}_scales", (*shape, 1), torch.float32)
                self._allocate(f"{name}_zeros", (*shape, 1), torch.int8)

    def write(self, key: torch.Tensor, value: torch.Tensor, places: Places) -> None:
        """Write new keys and values to their slots."""
        for name, new in (("keys", key), ("values", value)):
            if not self.int8_kv:
                self._write(name, new, places)
                continue
            scales, zeros = torch.ops.quantized_decomposed.choose_qparams_per_token_asymmetric(new, torch.int8)
            self._write(name, torch.ops.quantized_decomposed.quantize_per_token(new, scales, zeros, *_INT8), places)
            self._write(f"{name}_scales", scales.float(), places)
            self._write(f"{name}_zeros", zeros.to(torch.int8), places)

    def read(self, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values as floats, of all slots or of at least the first `stop`."""
        if not self.int8_kv:
            return self.keys, self.values
        return self._dequantised("keys", stop), self._dequantised("values", stop)

    def _allocate(self, name: str, shape: tuple[int, ...], kind: torch.dtype) -> None:
        self.register_buffer(name, torch.zeros(*shape, dtype=kind), persistent=False)

    def _write(self, name: str, new: torch.Tensor, places: Places) -> None:
        cache = self.get_buffer(name)
        if places.start is not None:
            torch.ops.llama.update_cache(new, cache, places.start)
        else:
            torch.ops.llama.update_cache_with_indices(new, cache, 0, places.slots[None])

    def _dequantised(self, name: str, stop: int | None) -> torch.Tensor:
        # Dequantise: ExecuTorch's attention on integers takes 6 to 25 times as long on x86.
        buffers = [self.get_buffer(f"{name}{suffix}") for suffix in ("", "_scales", "_zeros")]
        integers, scales, zeros = buffers if stop is None else [buffer.narrow(1, 0, stop) for buffer in buffers]
        values: torch.Tensor = torch.ops.quantized_decomposed.dequantize_per_token(
            integers, scales, zeros.to(torch.int64), *_INT8, torch.float32
        )
        return values


class Fused(Attention):
    """llama.custom_sdpa: causal over the cached tokens, or with a mask over all slots."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Places) -> torch.Tensor:
        self.write(key, value, places)
        mixed: torch.Tensor
        if places.start is not None and self.window is None:
            keys, values = self.read(places.start + query.shape[1])
            mixed = torch.ops.llama.custom_sdpa(query, keys, values, places.start, None, 0.0, True, self.scale)
            return mixed
        keys, values = self.read()
        mask = places.mask_of(self.slots, self.window)
        mixed = torch.ops.llama.custom_sdpa(query, keys, values, 0, mask, 0.0, False, self.scale)
        return mixed


class Plain(Attention):
    """Matrix products, soft cap, mask and softmax over all slots."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Places) -> torch.Tensor:
        self.write(key, value, places)
        return self.attend(query, *self.read(), places)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places) -> torch.Tensor:
        heads, dim, groups = query.shape[2], query.shape[3], keys.shape[2]
        shared = heads // groups  # query heads of one key head
        queries = query.view(-1, groups, shared, dim).permute(1, 2, 0, 3).contiguous().view(groups, -1, dim)
        scores = torch.bmm(queries * self.scale, keys[0].permute(1, 2, 0))
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        # Views may only split or join the dynamic dimension; across groups, its stride could not be proven.
        masked = scores.view(groups, shared, -1, self.slots) + places.mask_of(self.slots, self.window)
        mixed = torch.bmm(masked.softmax(-1).view(groups, -1, self.slots), values[0].permute(1, 0, 2))
        by_token = mixed.view(groups, shared, -1, dim).permute(2, 0, 1, 3).contiguous()
        return by_token.view(1, -1, heads, dim)


class Scattered(Plain):
    """Plain attention in torch's own operators: new rows enter the cache by a product with a one-hot matrix."""

    def write(self, key: torch.Tensor, value: torch.Tensor, places: Places) -> None:
        one_hot = (places.slots[None] == torch.arange(self.slots)[:, None]).to(key.dtype)  # [slot, count]
        unchanged = 1.0 - one_hot.sum(1)[:, None, None]
        for cache, new in ((self.keys, key), (self.values, value)):
            heads, dim = cache.shape[2], cache.shape[3]
            written = torch.mm(one_hot, new.view(-1, heads * dim)).view(self.slots, heads, dim)
            cache.copy_((cache[0] * unchanged + written)[None])


def attention_for(spec: ModelSpec, layer: Layer, slots: int, style: str, *, int8_kv: bool = False) -> Attention:
    """`Fused` where it can compute the layer, else `Plain`; `Scattered` for backends without ExecuTorch's operators."""
    if style == "scattered":
        assert not int8_kv, "backends without ExecuTorch's operators have no 8-bit cache"
        return Scattered(spec, layer, slots)
    return (Fused if spec.attention_softcap is None else Plain)(spec, layer, slots, int8_kv=int8_kv)
