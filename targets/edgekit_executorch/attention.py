"""Attention over the cache, and where new tokens go in it.

`Fused` is ExecuTorch's own operator, whose work grows with what is held. It knows no soft cap, for which `Plain` spells
everything out over all slots. Both hold keys and values as [1, slot, head, dim] and share their layout with the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from edgekit.model import Layer, ModelSpec

UNSEEN = -1e30  # not infinite: a block of the cache that is unseen as a whole must not become NaN


class Places(NamedTuple):
    """Where the new tokens stand and what they see. `start` is theirs where they follow what is held."""

    positions: torch.Tensor
    start: torch.SymInt | int | None
    slots: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    near: torch.Tensor | None = None

    @staticmethod
    def after(start: torch.Tensor, count: int, slots: int) -> Places:
        first = start.item()
        torch._check(first >= 0)  # type: ignore[no-untyped-call]
        torch._check(first + count <= slots)  # type: ignore[no-untyped-call]
        return Places(torch.arange(count) + start, first)  # type: ignore[arg-type]

    @staticmethod
    def chosen(
        positions: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor, near: torch.Tensor | None
    ) -> Places:
        return Places(positions, None, slots, mask, near)

    def pick(self, table: torch.Tensor) -> torch.Tensor:
        """The rows of a table at these positions."""
        if self.start is None:
            return table.index_select(0, self.positions)
        return table.narrow(0, self.start, self.positions.shape[0])  # type: ignore[arg-type]

    def seen(self, slots: int, window: int | None) -> torch.Tensor:
        """What is added to the scores [count, slots] of a layer that reaches back `window` positions."""
        if self.start is None:
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

    def __init__(self, spec: ModelSpec, layer: Layer, slots: int) -> None:
        super().__init__()
        self.scale, self.softcap, self.slots = spec.attention_scale, spec.attention_softcap, slots
        self.window = layer.window if layer.window is not None and layer.window < slots else None
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, slots, layer.kv_heads, layer.head_dim), persistent=False)

    def keep(self, key: torch.Tensor, value: torch.Tensor, places: Places) -> None:
        """Write new keys and values to their slots."""
        for cache, new in ((self.keys, key), (self.values, value)):
            if places.start is not None:
                torch.ops.llama.update_cache(new, cache, places.start)
            else:
                assert places.slots is not None
                torch.ops.llama.update_cache_with_indices(new, cache, 0, places.slots[None])


class Fused(Attention):
    """llama.custom_sdpa: causal over what is held, or by a mask over all slots."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Places) -> torch.Tensor:
        self.keep(key, value, places)
        if places.start is not None and self.window is None:
            return torch.ops.llama.custom_sdpa(query, self.keys, self.values, places.start, None, 0.0, True, self.scale)
        mask = places.seen(self.slots, self.window)
        return torch.ops.llama.custom_sdpa(query, self.keys, self.values, 0, mask, 0.0, False, self.scale)


class Plain(Attention):
    """Matrix products, soft cap, mask and softmax over all slots."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Places) -> torch.Tensor:
        self.keep(key, value, places)
        return self.attend(query, self.keys, self.values, places)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places) -> torch.Tensor:
        heads, dim = query.shape[2], query.shape[3]
        groups = keys.shape[2]
        asked = query.view(-1, groups, heads // groups, dim).permute(1, 2, 0, 3).reshape(groups, -1, dim)
        scores = torch.bmm(asked * self.scale, keys[0].permute(1, 2, 0))
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        mask = places.seen(self.slots, self.window)
        weights = (scores.view(heads, -1, self.slots) + mask).softmax(-1).view(groups, -1, self.slots)
        mixed = torch.bmm(weights, values[0].permute(1, 0, 2))
        return mixed.view(heads, -1, dim).permute(1, 0, 2)[None].contiguous()


def attention_for(spec: ModelSpec, layer: Layer, slots: int, style: str) -> Attention:
    """The fused operator where it knows all that the layer does."""
    if style == "fused" and spec.attention_softcap is None:
        return Fused(spec, layer, slots)
    return Plain(spec, layer, slots)
