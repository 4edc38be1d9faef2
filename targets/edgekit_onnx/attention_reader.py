"""Reads the attention that cached tokens get, for windows that keep tokens by it.

The newest tokens of a full window are computed once more, always the same number in the same pieces, so what is read
depends on the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgekit_onnx.kv_arena import KVArena
from edgekit_onnx.runner import BodyCall, Runner
from edgekit_onnx.session_variants import StateSessions


class AttentionReader:
    """Reads the attention that the newest tokens of a state pay, with the sessions of derived graphs."""

    def __init__(self, runner: Runner, running: StateSessions, *, heads: int, layers: int, chunk_tokens: int) -> None:
        """`chunk_tokens`: the most tokens of a call, which is even where exact mode would pad it."""
        self._runner, self._running, self._chunk_tokens = runner, running, chunk_tokens
        self._heads, self._layers = heads, layers

    def read(self, arena: KVArena, slot: int, first: int, tokens: Sequence[int]) -> list[NDArray[np.float32]]:
        """Compute `tokens` after the `first` ones in a slot; return each layer's weights [head, token] in their sum."""
        caching = [layer for layer, shape in enumerate(arena.layers) if shape.kv_heads]
        whole = first + len(tokens)
        totals = {layer: np.zeros((self._heads, whole), np.float32) for layer in caching}
        for start in range(0, len(tokens), self._chunk_tokens):
            ids = np.array([tokens[start : start + self._chunk_tokens]], np.int64)
            length = first + start + ids.size
            weights = {layer: np.empty((1, self._heads, length), np.float32) for layer in caching}
            call = BodyCall(ids, [length], self._layers, attention=weights)
            self._runner.body(self._running, arena, slot, call)
            for layer, found in weights.items():
                totals[layer][:, :length] += found[0]
        return list(totals.values())
