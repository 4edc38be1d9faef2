"""Measures the cost of the runtime for a decoded token, without the engine: microseconds by vocabulary and sampler.

The engine here answers at once with rows made beforehand, so all that is left is the loop, the sampler and the text.
Run: python -m examples.benchmarks.host_cost
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from time import thread_time
from typing import Any

import numpy as np

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.runtime.generation.tokenizer import Codec
from edgekit.runtime.runtime import Runtime
from edgekit.testing import FakeEngine, FakeState

TOKENS = 400
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, logprobs": {"logprobs": 1},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top-k 50": {"temperature": 0.8, "top_k": 50, "seed": 1},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05, "seed": 1},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "seed": 1},
}


class Ready(FakeEngine):
    """Counts tokens and answers with rows made beforehand, shaped like those of a trained model."""

    def __init__(self, vocabulary: int, states: int) -> None:
        super().__init__(vocabulary=vocabulary, max_states=states)
        random = np.random.default_rng(0)
        self._rows = (random.standard_normal((16, vocabulary)) * 2.5).astype(np.float32)
        self._rows[:, :40] += np.linspace(12, 4, 40, dtype=np.float32)

    def forward(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        found = []
        for chunk in chunks:
            assert isinstance(chunk.state, FakeState)
            chunk.state.length += len(chunk.tokens)
            chunk.state.position += len(chunk.tokens)
            place = chunk.state.position % 16
            found.append(self._rows[place : place + 1] if chunk.num_logits else self._rows[:0])
        return found


def tokenizer(vocabulary: int) -> Codec:
    """A byte-level tokenizer in which every token is a word."""
    words = {f"Ġword{place}": place for place in range(vocabulary)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "Ġword0"}
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    whole = {"version": "1.0", "added_tokens": [], "model": model, "decoder": decoder}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return Codec(json.dumps({**whole, **empty}).encode(), "made here")


def cost_us(codec: Codec, options: dict[str, Any], together: int) -> float:
    """Microseconds of processor time for each token, the median of five rounds: other programs do not count."""
    costs = []
    for _ in range(5):
        engine = Ready(codec.vocabulary, together)
        storage = KVCacheConfig(capacity_tokens=TOKENS + 64, kv_bits=8)
        with Runtime(engine, codec, kv_config=storage, policy=KVEvictionPolicy(), sequences=together) as runtime:
            streams = [runtime.submit([1, 2, 3], max_tokens=TOKENS, **options) for _ in range(together)]
            began = thread_time()
            for stream in streams:
                for _ in stream:
                    pass
            costs.append(1e6 * (thread_time() - began) / runtime.metrics().tokens)
    return median(costs)


def main() -> None:
    print(f"{'microseconds of the host for each token':<42}{'32k':>8}{'128k':>8}")
    codecs = [tokenizer(32_000), tokenizer(128_000)]
    for name, options in SAMPLERS.items():
        print(f"{name:<42}" + "".join(f"{cost_us(codec, options, 1):>8.0f}" for codec in codecs))
    print(f"{'greedy, eight requests together':<42}" + "".join(f"{cost_us(codec, {}, 8):>8.0f}" for codec in codecs))


if __name__ == "__main__":
    main()
