"""Drafts with Gemma 4's assistant on the target's own keys and values, of which no copy is kept."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from edgekit.drafters import Proposer, draft
from edgekit.methods.drafters.assistant_decoder import CachedText

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.contracts.engine import State
    from edgekit.drafters import DraftRequest
    from edgekit.methods.drafters.assistant_decoder import AssistantDecoder

    Floats = NDArray[np.float32]


class AssistantDrafting:
    """An open assistant, for all requests of a runtime."""

    name = "head"
    reads_hidden = True

    def __init__(
        self,
        model: AssistantDecoder,
        *,
        one_s: float,
        bytes: int = 0,  # noqa: A002 - the name in `DraftMethod`
        tokens: int = 6,
    ) -> None:
        self.model, self.bytes, self.tokens, self._one_s = model, bytes, tokens, one_s

    def start(self, request: DraftRequest) -> AssistantDrafter:
        return AssistantDrafter(self, request)

    def draft_s(self, tokens: int) -> float:
        return self._one_s * tokens

    def close(self) -> None:
        self.model.close()


class AssistantDrafter(Proposer):
    """Draft for one request, on the state of the target."""

    match_length = 0

    def __init__(self, drafting: AssistantDrafting, request: DraftRequest) -> None:
        assert request.hidden is not None
        self._drafting, self._model, self._request, self._log = drafting, drafting.model, request, request.hidden
        self._log.most_tokens = 1
        self._newest: Floats | None = None  # the target's hidden state of position `_next - 1`
        self._next = 0

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        for start, rows in self._log.take():
            if len(rows):
                self._newest, self._next = np.array(rows[-1:]), start + len(rows)
        state = self._request.state()
        if state is None or self._newest is None or not self._next == state.position == len(history) - 1:
            return ()  # the newest hidden state was not requested
        seen, hidden = CachedText.of(state), self._model.combine(self._newest)[0]

        def feed(token: int) -> Floats:
            nonlocal hidden
            hidden, normed = self._model.forward(seen, token, hidden)
            return self._model.over_vocabulary(self._model.logits(normed))

        limit = min(limit, self._drafting.tokens)
        vocabulary = self._model.spec.layer.vocab_size
        return draft(self._request, vocabulary, len(history), limit, feed(history[-1]), feed)

    def observe(self, accepted: Sequence[int]) -> None:
        """Nothing to learn: `propose` gets the hidden states of accepted tokens."""

    def close(self) -> None:
        self._newest = None


class AssistantProbe:
    """Times an assistant on the cache of a state."""

    def __init__(self, model: AssistantDecoder, state: State) -> None:
        self._model, self._seen = model, CachedText.of(state)
        self._hidden = np.random.default_rng(0).standard_normal(model.spec.target_hidden_size, np.float32)
        self.seconds(1)  # opens what looks embeddings up, even if the cost is known

    def seconds(self, tokens: int) -> float:
        """Time `tokens` tokens, each after the one before."""
        started = perf_counter()
        hidden = self._hidden
        for token in range(tokens):
            hidden, normed = self._model.forward(self._seen, token, hidden)
            self._model.logits(normed)
        return perf_counter() - started
