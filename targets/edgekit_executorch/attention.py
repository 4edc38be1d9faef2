"""Attention over the cache, and where new tokens go in it.

`Fused` is ExecuTorch's own operator, whose work grows with what is held. It knows no soft cap, for which `Plain` spells
everything out over all slots; `Scattered` needs no operator of ExecuTorch at all. Each holds keys and values as
[1, slot, head, dim], the layout that a host sees; narrow ones in 8 bits, where each token of a head has a scale and
what stands for zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from edgekit.model import Layer, ModelSpec

_INT8 = (-128, 127, torch.int8)
UNSEEN = -1e30  # not infinite: a block of the cache that is unseen as a whole must not become NaN


class Places(NamedTuple):
    """Where the new tokens stand and what they see. `start` is theirs where they follow what is held."""

    positions: torch.Tensor
    start: int | None
    slots: torch.Tensor
    mask: torch.Tensor | None = None
    near: torch.Tensor | None = None

    @staticmethod
    def after(start: torch.Tensor, count: int, slots: int) -> Places:
        """Behind what is held, with a start that is a number."""
        first: int = start.item()  # type: ignore[assignment]  # a symbol while tracing, and int() would ask for it
        torch._check(first >= 0)  # type: ignore[no-untyped-call]
        torch._check(first + count <= slots)  # type: ignore[no-untyped-call]
        positions = torch.arange(count) + start
        return Places(positions, first, positions)

    @staticmethod
    def following(start: torch.Tensor, count: int) -> Places:
        """The same for backends that know no numbers, only tensors."""
        positions = torch.arange(count) + start
        return Places(positions, None, positions)

    @staticmethod
    def chosen(positions: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, near: torch.Tensor | None) -> Places:
        return Places(positions, None, slots, mask, near)

    def pick(self, table: torch.Tensor) -> torch.Tensor:
        """The rows of a table at these positions."""
        if self.start is None:
            return table.index_select(0, self.positions)
        return table.narrow(0, self.start, self.positions.shape[0])

    def seen(self, slots: int, window: int | None) -> torch.Tensor:
        """What is added to the scores [count, slots] of a layer that reaches back `window` positions."""
        if self.mask is not None:
            found = self.mask if window is None else self.near
            assert found is not None, "a windowed layer needs a mask of its own"
            return found
        distance = self.positions[:, None] - torch.arange(slots)[None]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        return hidden.float() * UNSEEN


class Attention(nn.Module):
    """One layer's keys and values."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, spec: ModelSpec, layer: Layer, slots: int, *, narrow: bool = False) -> None:
        super().__init__()
        self.scale, self.softcap, self.slots = spec.attention_scale, spec.attention_softcap, slots
        self.window = layer.window if layer.window is not None and layer.window < slots else None
        self.is_narrow = narrow
        shape = (1, slots, layer.kv_heads)
        for name in ("keys", "values"):
            self._set_apart(name, (*shape, layer.head_dim), torch.int8 if narrow else torch.float32)
            if narrow:
                self._set_apart(f"{name}_scales", (*shape, 1), torch.float32)
                self._set_apart(f"{name}_zeros", (*shape, 1), torch.int8)

    def keep(self, key: torch.Tensor, value: torch.Tensor, places: Places) -> None:
        """Write new keys and values to their slots."""
        for name, new in (("keys", key), ("values", value)):
            if not self.is_narrow:
                self._write(name, new, places)
                continue
            scales, zeros = torch.ops.quantized_decomposed.choose_qparams_per_token_asymmetric(new, torch.int8)
            self._write(name, torch.ops.quantized_decomposed.quantize_per_token(new, scales, zeros, *_INT8), places)
            self._write(f"{name}_scales", scales.float(), places)
            self._write(f"{name}_zeros", zeros.to(torch.int8), places)

    def held(self, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in floats: of all slots, or of the first `stop` at least."""
        if not self.is_narrow:
            return self.keys, self.values
        return self._widened("keys", stop), self._widened("values", stop)

    def _set_apart(self, name: str, shape: tuple[int, ...], kind: torch.dtype) -> None:
        self.register_buffer(name, torch.zeros(*shape, dtype=kind), persistent=False)

    def _write(self, name: str, new: torch.Tensor, places: Places) -> None:
        cache = self.get_buffer(name)
        if places.start is not None:
            torch.ops.llama.update_cache(new, cache, places.start)
        else:
            torch.ops.llama.update_cache_with_indices(new, cache, 0, places.slots[None])

    def _widened(self, name: str, stop: int | None) -> torch.Tensor:
        # The vendor's attention on integers takes 6 to 25 times as long on x86 as widening what is held, and floats.
        whole = [self.get_buffer(f"{name}{what}") for what in ("", "_scales", "_zeros")]
        integers, scales, zeros = whole if stop is None else [each.narrow(1, 0, stop) for each in whole]
        found: torch.Tensor = torch.ops.quantized_decomposed.dequantize_per_token(
            integers, scales, zeros.to(torch.int64), *_INT8, torch.float32
        )
        return found


class Fused(Attention):
    """llama.custom_sdpa: causal over what is held, or by a mask over all slots."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Places) -> torch.Tensor:
        self.keep(key, value, places)
        found: torch.Tensor
        if places.start is not None and self.window is None:
            keys, values = self.held(places.start + query.shape[1])
            found = torch.ops.llama.custom_sdpa(query, keys, values, places.start, None, 0.0, True, self.scale)
            return found
        keys, values = self.held()
        mask = places.seen(self.slots, self.window)
        found = torch.ops.llama.custom_sdpa(query, keys, values, 0, mask, 0.0, False, self.scale)
        return found


class Plain(Attention):
    """Matrix products, soft cap, mask and softmax over all slots."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Places) -> torch.Tensor:
        self.keep(key, value, places)
        return self.attend(query, *self.held(), places)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places) -> torch.Tensor:
        heads, dim, groups = query.shape[2], query.shape[3], keys.shape[2]
        each = heads // groups
        asked = query.view(-1, groups, each, dim).permute(1, 2, 0, 3).contiguous().view(groups, -1, dim)
        scores = torch.bmm(asked * self.scale, keys[0].permute(1, 2, 0))
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        # Views only ever split the counted size or join it: across groups its stride could not be proven.
        masked = scores.view(groups, each, -1, self.slots) + places.seen(self.slots, self.window)
        mixed = torch.bmm(masked.softmax(-1).view(groups, -1, self.slots), values[0].permute(1, 0, 2))
        found = mixed.view(groups, each, -1, dim).permute(2, 0, 1, 3).contiguous()
        return found.view(1, -1, heads, dim)


class Scattered(Plain):
    """The same in torch's own operators alone: new rows come in by a product with ones where they belong."""

    def keep(self, key: torch.Tensor, value: torch.Tensor, places: Places) -> None:
        places_of = (places.slots[None] == torch.arange(self.slots)[:, None]).to(key.dtype)  # [slot, count]
        stays = 1.0 - places_of.sum(1)[:, None, None]
        for cache, new in ((self.keys, key), (self.values, value)):
            heads, dim = cache.shape[2], cache.shape[3]
            brought = torch.mm(places_of, new.view(-1, heads * dim)).view(self.slots, heads, dim)
            cache.copy_((cache[0] * stays + brought)[None])


STYLES = ("fused", "scattered")


def attention_for(spec: ModelSpec, layer: Layer, slots: int, style: str, *, narrow: bool = False) -> Attention:
    """The fused operator where it knows all that the layer does; `scattered` for backends without ours."""
    if style == "scattered":
        assert not narrow, "backends without our operators hold no narrow cache"
        return Scattered(spec, layer, slots)
    return (Fused if spec.attention_softcap is None else Plain)(spec, layer, slots, narrow=narrow)
