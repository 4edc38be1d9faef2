"""Choose the tokens of one request, and draft the tokens that the engine verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgekit.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.capabilities import Capabilities
    from edgekit.contracts.drafter import Drafter
    from edgekit.runtime.generation.sampling import Logprob, Sampler
    from edgekit.runtime.generation.structured import Grammar
    from edgekit.runtime.speculation.controller import DrafterFactory
    from edgekit.runtime.speculation.draft_method import DraftRequest


class Decoding:
    """The sampler, the grammar and the drafter of one request, and the proposal that is being verified.

    A proposal is accepted as far as it equals what the sampler chooses, so drafting never changes the text.
    """

    def __init__(self, sampler: Sampler, grammar: Grammar | None) -> None:
        self.sampler, self.grammar = sampler, grammar
        self.proposal: Sequence[int] = ()
        self._drafter: Drafter | None = None
        self._vocabulary = self._max_drafted = 0
        self._reports_logprobs = sampler.sampling.logprobs is not None

    def start_drafter(self, factory: DrafterFactory, request: DraftRequest, capabilities: Capabilities) -> None:
        """Draft from now on. A proposal is no longer than the engine can verify and rewind in one step."""
        limits = (factory.tokens, capabilities.max_chunk_tokens - 1, capabilities.max_rewind)
        self._drafter = factory.start(request)
        self._max_drafted = min(limit for limit in limits if limit is not None)
        self._vocabulary = capabilities.vocabulary

    def propose(self, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """Set and return the `proposal` of at most `limit` tokens after `tokens`; it may be empty."""
        self.proposal = ()
        if self._drafter is None:
            return ()
        limit = min(limit, self._max_drafted)
        proposal = self._drafter.propose(tokens, limit) if limit > 0 else ()
        if not len(proposal):
            return ()
        if len(proposal) > limit or min(proposal) < 0 or max(proposal) >= self._vocabulary:
            raise InvalidInput(f"the drafter proposed {len(proposal)} tokens, allowed {limit}, or unknown ones")
        self.proposal = list(proposal)
        return self.proposal

    def choose(self, logits: NDArray[np.float32], position: int) -> int:
        """Return the token for `position`, among those that the grammar allows."""
        allowed = self.grammar.allowed() if self.grammar is not None else None
        return self.sampler.choose(logits, position, allowed)

    def append(self, token: int, logits: NDArray[np.float32]) -> Logprob | None:
        """Add `token` to the sampler's counts; return its log probability if the request asks for it."""
        self.sampler.observe(token)
        return self.sampler.logprob(logits, token) if self._reports_logprobs else None

    def learn(self, tokens: Sequence[int]) -> None:
        """Tell the drafter which tokens the step generated."""
        if self._drafter is not None:
            self._drafter.observe(tokens)

    def close(self) -> None:
        """Close the drafter and the grammar. Closing twice is allowed."""
        drafter, self._drafter = self._drafter, None
        grammar, self.grammar = self.grammar, None
        try:
            if drafter is not None:
                drafter.close()
        finally:
            if grammar is not None:
                grammar.close()
