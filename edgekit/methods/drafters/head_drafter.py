"""Drafts with a head. It reads the target's hidden states for the text, and its own for drafted tokens.

The head's input pairs token i + 1 with the hidden states of token i, so that it proposes token i + 2. Drafted tokens
leave its cache before the next proposal; accepted ones are fed again with the target's hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from edgekit.drafters import draft

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.contracts.engine import State
    from edgekit.drafters import DraftRequest
    from edgekit.methods.drafters.head_decoder import HeadCache, HeadDecoder

    Floats = NDArray[np.float32]


class HeadDrafting:
    """An open head, for all requests of a runtime."""

    name = "head"
    reads_hidden = True

    def __init__(
        self,
        model: HeadDecoder,
        *,
        capacity: int,
        one_s: float,
        block_token_s: float,
        bytes: int = 0,  # noqa: A002 - the name in `DraftMethod`
        tokens: int = 6,
    ) -> None:
        self.model, self.bytes, self.tokens = model, bytes, tokens
        self.capacity = model.spec.cached_tokens(capacity)
        self._one_s, self._block_token_s = one_s, block_token_s

    def start(self, request: DraftRequest) -> HeadDrafter:
        return HeadDrafter(self, request)

    def draft_s(self, tokens: int) -> float:
        # The accepted tokens of the last step are fed together, before the first token is drafted.
        return self._one_s * tokens + self._block_token_s

    def prefill_s(self, tokens: int) -> float:
        """Seconds to process `tokens` tokens of a text."""
        return self._block_token_s * tokens

    def close(self) -> None:
        self.model.close()


class HeadDrafter:
    """Draft for one request."""

    match_length = 0

    def __init__(self, drafting: HeadDrafting, request: DraftRequest) -> None:
        assert request.hidden is not None
        self._drafting, self._model, self._request, self._hidden = drafting, drafting.model, request, request.hidden
        self._hidden.most_tokens = drafting.capacity
        self._cache: HeadCache | None = None
        self._num_drafted = 0  # drafted tokens at the end of the cache
        self._next = 0  # the first position not yet fed with the target's hidden states
        self._output: Floats | None = None  # hidden states of the position before

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        cache = self._cache = self._cache or self._model.start(self._drafting.capacity, self._embedded)
        cache.length -= self._num_drafted
        self._num_drafted = 0
        self._catch_up(cache, history)
        if self._output is None or self._next != len(history) - 1:
            return ()  # the newest hidden states were not requested
        output = self._output

        def feed(token: int) -> Floats:
            nonlocal output
            position = np.array([self._next + self._num_drafted])
            output = self._model.forward(cache, np.array([token]), output[None], position)[-1]
            self._num_drafted += 1
            return self._logits(output)

        limit = min(limit, self._drafting.tokens)
        vocabulary = self._model.spec.layer.vocab_size
        return draft(self._request, vocabulary, len(history), limit, self._logits(output), feed)

    def catch_up_s(self, history: Sequence[int]) -> float:
        waiting = self._hidden.num_tokens
        return self._drafting.prefill_s(waiting) if waiting > self._drafting.tokens + 1 else 0.0

    def observe(self, accepted: Sequence[int]) -> None:
        """Nothing to learn: `propose` gets the hidden states of accepted tokens."""

    def close(self) -> None:
        self._cache = self._output = None

    def _catch_up(self, cache: HeadCache, history: Sequence[int]) -> None:
        """Feed the tokens whose hidden states came since the last proposal. Tokens in a gap are left out."""
        for start, rows in self._hidden.take():
            fed = max(0, self._next - start)  # these came again after a failed call
            if fed >= len(rows):
                continue
            start, rows = start + fed, rows[fed:]
            stop = start + len(rows)
            tokens = np.array(history[start + 1 : stop + 1], np.int64)
            self._output = self._model.forward(cache, tokens, self._model.combine(rows), np.arange(start, stop))[-1]
            self._next = stop

    def _embedded(self, tokens: Sequence[int]) -> Floats:
        """Look embeddings up in the target, whose state may have changed since the last proposal."""
        state = self._request.state()
        assert state is not None, "only a running request is drafted for"
        return state.embedded(tokens)

    def _logits(self, output: Floats) -> Floats:
        """Return the draft's logits over the target's vocabulary."""
        return self._model.over_vocabulary(self._model.logits(output))


class HeadProbe:
    """Times the head on invented hidden states, `at_once` tokens together, while a state of its target is open."""

    def __init__(self, model: HeadDecoder, state: State, at_once: int = 1) -> None:
        block, random = model.spec.block_tokens, np.random.default_rng(0)
        self._model, self._at_once, self._cache = model, at_once, model.start(2 * block, state.embedded)
        self._rows = random.standard_normal((block, model.spec.width), np.float32)
        self._tokens = random.integers(0, model.spec.layer.vocab_size, block)
        self._feed(min(block, self._cache.capacity // 2))  # fill the cache for attention

    def seconds(self, tokens: int) -> float:
        """Time `tokens` tokens, each as its share of a block."""
        started = perf_counter()
        self._feed(self._at_once)
        elapsed = perf_counter() - started
        self._cache.length -= self._at_once
        return elapsed / self._at_once * tokens

    def _feed(self, tokens: int) -> None:
        inputs = self._model.combine(self._rows[:tokens])
        output = self._model.forward(self._cache, self._tokens[:tokens], inputs, np.arange(tokens))
        self._model.logits(output[-1])
