"""The arithmetic that all drafting heads share: mapped weights, norms, products and rotary embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edgekit import ModelSpec
from edgekit.drafters import HeadWeights, frequencies, rotated_pairs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Embed = Callable[[Sequence[int]], Floats]
    Turns = tuple[Floats, Floats]  # cosines and sines [tokens, 1, pairs]


class HeadArithmetic:
    """The weights of a sealed head. Its matrices are views of the file; norms and its tokens are copies."""

    def __init__(self, head: HeadWeights) -> None:
        assert head.targets is not None, "sealing a head adds what it shares with its target"
        self.spec, self.targets = head.spec, head.targets
        self._head = head
        self._weights: dict[str, NDArray[Any]] = {
            name: head.tensors.array(head.stored[name])
            if head.tensors.entry(head.stored[name]).dtype in ("F32", head.spec.head_type) and len(shape) == 2
            else head.floats(name)
            for name, shape in head.spec.tensors()
        }

    def close(self) -> None:
        self._weights.clear()
        self._head.close()

    def over_vocabulary(self, logits: Floats) -> Floats:
        """Return draft logits over the target's vocabulary; -inf for tokens that the head cannot draft."""
        whole = np.full(self.spec.layer.vocab_size, -np.inf, np.float32)
        whole[self.targets] = logits
        return whole

    def _norm(self, x: Floats, name: str) -> Floats:
        scale = np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(self.spec.layer.norm_epsilon))
        normed: Floats = x / scale * self._weights[name]
        return normed

    def _linear(self, x: Floats, module: str) -> Floats:
        product: Floats = x @ self._weights[f"{module}.weight"].T
        bias = self._weights.get(f"{module}.bias")
        return product if bias is None else product + bias


class HeadRope:
    """Rotates queries and keys [tokens, heads, width] by their positions."""

    def __init__(self, model: ModelSpec, name: str) -> None:
        rope = model.ropes[name]
        inverse, self._scale = frequencies(rope, model.max_positions)
        self._inverse = np.asarray(inverse, np.float64)
        self._pairs = tuple(map(np.asarray, rotated_pairs(rope)))

    def turns(self, positions: NDArray[np.int64]) -> Turns:
        angles = positions[:, None].astype(np.float64) * self._inverse
        cosines, sines = ((self._scale * curve(angles)).astype(np.float32)[:, None] for curve in (np.cos, np.sin))
        return cosines, sines

    def turned(self, x: Floats, turns: Turns) -> Floats:
        cosines, sines = turns
        first, second = self._pairs
        one, other = x[:, :, first], x[:, :, second]
        turned = x.copy()
        turned[:, :, first] = one * cosines - other * sines
        turned[:, :, second] = other * cosines + one * sines
        return turned
