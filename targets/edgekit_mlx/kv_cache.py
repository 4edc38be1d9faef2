"""Keys and values of one layer of one state, written in place.

The cache is linear, not a ring, so a state can be rewound at any time, and sums run in the same order whatever the
chunks. Four and eight bits use MLX's own packing, which its kernels multiply without unpacking.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.engine import CachedKV
from edgekit.model.parts import Layer

FLOATS = {32: mx.float32, 16: mx.float16}
_SCALES = mx.float16


def group_of(head_dim: int) -> int | None:
    """Return the number of quantised keys or values that share a scale; None if no group divides a head."""
    return next((group for group in (64, 32) if head_dim % group == 0), None)


def layout(layer: Layer, bits: int) -> list[tuple[int, mx.Dtype]]:
    """Return width and type of each array [kv_heads, tokens, width]: first for keys, then for values."""
    if bits in FLOATS:
        return [(layer.head_dim, FLOATS[bits])] * 2
    group = group_of(layer.head_dim)
    assert group is not None, layer
    scales = (layer.head_dim // group, _SCALES)
    return [(layer.head_dim * bits // 32, mx.uint32), scales, scales] * 2


def rounded(values: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """Return keys or values [kv_head, token, dim] as a cache of `bits` bits gives them back."""
    if bits in FLOATS:
        return np.array(mx.array(values).astype(FLOATS[bits]).astype(mx.float32))
    group = group_of(values.shape[-1])
    words, scales, biases = mx.quantize(mx.array(values).astype(_SCALES), group_size=group, bits=bits)
    return np.array(mx.dequantize(words, scales, biases, group_size=group, bits=bits).astype(mx.float32))


class LayerCache:
    """The cache of one layer for `capacity` tokens. The state counts the filled ones."""

    def __init__(self, layer: Layer, capacity: int, bits: int, score_bytes: int) -> None:
        self._bits, self._group = bits, group_of(layer.head_dim) or 0
        self.kv_heads = layer.kv_heads
        self._score_bytes = score_bytes
        self.arrays = [mx.zeros((layer.kv_heads, capacity, width), dtype) for width, dtype in layout(layer, bits)]

    def append(self, at: int, keys: mx.array, values: mx.array) -> None:
        """Write keys and values [kv_heads, tokens, head_dim] from token `at` on."""
        stop = at + keys.shape[1]
        for array, part in zip(self.arrays, [*self._stored(keys), *self._stored(values)], strict=True):
            array[:, at:stop] = part

    def keys(self, start: int, stop: int) -> mx.array:
        """Return the keys of tokens `start` to `stop` in float32."""
        return self._read(self.arrays[: len(self.arrays) // 2], start, stop).astype(mx.float32)

    def read(self, start: int, stop: int) -> CachedKV:
        """Return keys and values of tokens `start` to `stop` in float32."""
        half = len(self.arrays) // 2
        parts = (self._read(arrays, start, stop) for arrays in (self.arrays[:half], self.arrays[half:]))
        return CachedKV(*(np.array(mx.contiguous(part.astype(mx.float32)), copy=False) for part in parts))

    def head(self, index: int, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the keys and values [1, tokens, head_dim] of one head."""
        arrays, half = [array[index : index + 1] for array in self.arrays], len(self.arrays) // 2
        keys, values = (self._read(part, start, stop) for part in (arrays[:half], arrays[half:]))
        return np.array(mx.contiguous(keys), copy=False), np.array(mx.contiguous(values), copy=False)

    def replace_keys(self, start: int, keys: mx.array) -> None:
        """Overwrite the keys of tokens from `start` on."""
        stop = start + keys.shape[1]
        for array, part in zip(self.arrays, self._stored(keys), strict=False):
            array[:, start:stop] = part

    def shift_kv(self, start: int, stop: int, length: int) -> None:
        """Move the tokens from `stop` on to `start`."""
        for array in self.arrays:
            # Evaluate first: the write then has the only reference to the array and needs no copy of it.
            kept = mx.contiguous(array[:, stop:length])
            mx.eval(kept)
            array[:, start : start + length - stop] = kept
            mx.eval(array)

    def attend(
        self,
        queries: mx.array,
        start: int,
        stop: int,
        mask: mx.array | str | None,
        scale: float,
        softcap: float | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Attend queries [heads, tokens, head_dim] to the tokens `start` to `stop`; the last ones are the queries' own.

        `mask` [tokens, stop - start] is True where a key is visible; "causal": every key up to the query's own; None:
        every key. `sinks` has a score of each head that takes a share of the weights and has no value. Many queries run
        in blocks whose scores take at most `score_bytes`.
        """
        heads, tokens, _ = queries.shape
        block = max(1, self._score_bytes // (4 * heads * (stop - start)))
        if tokens <= block:
            return self._attend(queries, start, stop, mask, scale, softcap, sinks)
        blocks = []
        for first in range(0, tokens, block):
            last = min(first + block, tokens)
            end = stop - tokens + last
            visible = mask[first:last, : end - start] if isinstance(mask, mx.array) else mask
            blocks.append(self._attend(queries[:, first:last], start, end, visible, scale, softcap, sinks))
        return mx.concatenate(blocks, axis=1)

    def _attend(
        self,
        queries: mx.array,
        start: int,
        stop: int,
        mask: mx.array | str | None,
        scale: float,
        softcap: float | None,
        sinks: mx.array | None,
    ) -> mx.array:
        heads, tokens, dim = queries.shape
        half = len(self.arrays) // 2
        keys, values = self.arrays[:half], self.arrays[half:]
        if self._bits in FLOATS and softcap is None:
            cached = (self._read(arrays, start, stop).astype(queries.dtype)[None] for arrays in (keys, values))
            sinks = None if sinks is None else sinks.astype(queries.dtype)
            mixed = mx.fast.scaled_dot_product_attention(queries[None], *cached, scale=scale, mask=mask, sinks=sinks)
            return mixed[0]
        grouped = (queries * scale).reshape(self.kv_heads, -1, dim)
        scores = self._times(grouped, keys, start, stop, transpose=True).reshape(heads, tokens, stop - start)
        if softcap is not None:
            scores = mx.tanh(scores / softcap) * softcap
        if isinstance(mask, str):
            mask = mx.arange(stop - tokens, stop)[:, None] >= mx.arange(start, stop)[None, :]
        if mask is not None:
            scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        if sinks is not None:
            shared = mx.broadcast_to(sinks.astype(scores.dtype)[:, None, None], (heads, tokens, 1))
            scores = mx.concatenate([scores, shared], axis=-1)
        weights = mx.softmax(scores, axis=-1, precise=True)[..., : stop - start]
        weights = weights.reshape(self.kv_heads, -1, stop - start)
        return self._times(weights, values, start, stop, transpose=False).reshape(heads, tokens, dim)

    def _stored(self, values: mx.array) -> list[mx.array]:
        if self._bits in FLOATS:
            return [values.astype(FLOATS[self._bits])]
        return list(mx.quantize(values.astype(_SCALES), group_size=self._group, bits=self._bits))

    def _read(self, arrays: list[mx.array], start: int, stop: int) -> mx.array:
        parts = [array[:, start:stop] for array in arrays]
        if len(parts) == 1:
            return parts[0]
        words, scales, biases = parts
        return mx.dequantize(words, scales, biases, group_size=self._group, bits=self._bits)

    def _times(self, left: mx.array, arrays: list[mx.array], start: int, stop: int, *, transpose: bool) -> mx.array:
        parts = [array[:, start:stop] for array in arrays]
        if len(parts) == 1:
            right = parts[0].astype(left.dtype)
            return left @ (right.swapaxes(-1, -2) if transpose else right)
        words, scales, biases = parts
        return mx.quantized_matmul(
            left,
            words,
            scales.astype(left.dtype),
            biases.astype(left.dtype),
            transpose=transpose,
            group_size=self._group,
            bits=self._bits,
        )
