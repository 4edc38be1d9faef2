"""One request on its way: its tokens, its state, and what becomes of each token that is chosen for it.

It knows nothing of other requests: the loop decides when it runs.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Tokens
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from edgekit.errors import ContextExceeded, InvalidInput
from edgekit.interfaces import Chunk
from edgekit.runtime.drafting import Request, Rest
from edgekit.runtime.metrics import Timings
from edgekit.runtime.stopping import FinishReason, Stopping, StopStrings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.cache import CachePolicy, Storage
    from edgekit.interfaces import Abilities, Drafter, Logits, State
    from edgekit.runtime.drafting import Source
    from edgekit.runtime.prefixes import Reuse
    from edgekit.runtime.sampling import Logprob, Sampler
    from edgekit.runtime.text import Detokeniser


class Piece(NamedTuple):
    """A piece of an answer. The last one carries the reason why it ended, and how the time was spent."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None
    timings: Timings | None = None


PRIORITY_S = 10.0  # of waiting, that one step of priority is worth


class Grammar(Protocol):
    """What may come next; a structured answer has one."""

    def allowed(self) -> NDArray[np.bool_]: ...
    def advance(self, token: int) -> None: ...
    def fork(self) -> Grammar: ...
    def is_finished(self) -> bool: ...


class Bounds(NamedTuple):
    """What a sequence may use of the engine, the same for all sequences of a runtime."""

    abilities: Abilities
    policy: CachePolicy
    storage: Storage
    chunk_tokens: int
    eos: frozenset[int]

    @property
    def last_position(self) -> int | None:
        """How many tokens a sequence can have in all; None: any number."""
        bounds = [self.abilities.max_position, None if self.policy.window else self.storage.capacity_tokens]
        return min((bound for bound in bounds if bound is not None), default=None)


class Sequence:
    """A living request. `finish` and `fail` end it once; after that it holds no state."""

    def __init__(
        self,
        bounds: Bounds,
        prompt: Tokens[int],
        sampler: Sampler,
        stopping: Stopping,
        detokeniser: Detokeniser,
        *,
        grammar: Grammar | None = None,
        source: Source | None = None,
        reuse: Reuse | None = None,
        priority: int = 0,
    ) -> None:
        vocabulary = bounds.abilities.vocabulary
        if not prompt:
            raise InvalidInput("the prompt has no tokens; give at least one")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise InvalidInput(f"the prompt holds a token outside the vocabulary of {vocabulary}")
        last = bounds.last_position
        if last is not None and len(prompt) >= last:
            raise ContextExceeded(len(prompt), last - 1, "shorten it, open with a window, or export a larger context")
        # The prompt, then every token that was chosen: four bytes each, however long the answer.
        self.tokens = array("i", prompt)
        self.state: State | None = None
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.pieces: deque[Piece] = deque()
        self.proposal: Tokens[int] = ()
        self._bounds, self._sampler, self._grammar = bounds, sampler, grammar
        self._ends = frozenset(stopping.stop_tokens) | (frozenset() if stopping.ignore_eos else bounds.eos)
        self._stops, self._detokeniser = StopStrings(stopping.stop), detokeniser
        self._prompt_tokens = len(prompt)
        wanted = last if stopping.max_tokens is None else len(prompt) + stopping.max_tokens
        # Without any bound (a window and no limit given) an answer is as long as what the state can hold.
        self._last = min(
            (n for n in (last, wanted) if n is not None), default=len(prompt) + bounds.storage.capacity_tokens
        )
        self._drafter: Drafter | None = None
        self._most_drafted = self._resting = 0
        if source is not None:
            self._drafter = source.start(self._request(prompt))
            able = bounds.abilities
            most = (source.tokens, able.max_chunk_tokens - 1, able.max_rewind)
            self._most_drafted = min(bound for bound in most if bound is not None)
        self._text = ""
        self._new: list[int] = []
        self._logprobs: list[Logprob] = []
        self._asked = perf_counter()
        self._started = self._first = self._latest = 0.0  # zero: not yet
        self._reuse, self._verified = reuse, 0  # tokens that the state was fed and that stand in `tokens`
        self.cached_tokens = 0
        # Whoever has the smallest rank comes first: a priority is worth that long a wait, so nobody waits for ever.
        self.rank = self._asked - priority * PRIORITY_S
        self.turns = 0  # prefill pieces so far, for fairness
        self.is_suspect = False  # a call failed with it and others; it is tried once more, alone
        self.proposed = self.accepted = self.evictions = 0

    def _request(self, prompt: Tokens[int]) -> Request:
        return Request(
            prompt,
            self._sampler,
            self._bounds.policy,
            self._last,
            lambda: self.state,
            self._grammar,
            self._ends,
        )

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self._prompt_tokens

    @property
    def prompt_tokens(self) -> int:
        return self._prompt_tokens

    @property
    def seed(self) -> int:
        """What reproduces this answer."""
        return self._sampler.seed

    def start(self, state: State) -> None:
        """A state is free: from here on the request runs, after what is known of its prompt already."""
        self.state, self._started = state, self._started or perf_counter()
        if self._reuse is not None:
            bounds = (len(self.tokens) - 1, self.storage.capacity_tokens, self._bounds.policy.room(0))
            most = min(bound for bound in bounds if bound is not None)
            self.cached_tokens = self._verified = self._reuse.restore(state, self.tokens, most)

    @property
    def storage(self) -> Storage:
        """How its state is held."""
        return self._bounds.storage

    def lose(self, error: BaseException) -> None:
        """A call failed that others took part in, and the state is gone: begin again from the tokens, once, alone."""
        if self.is_suspect:
            self.fail(error)
            return
        state, self.state = self.state, None
        self.is_suspect, self.proposal, self._verified = True, (), 0
        if state is not None:
            state.close()

    def next_chunk(self, room_tokens: int) -> Chunk | None:
        """What to feed next, evicting first where the window is full; None where it is larger than `room_tokens`.

        Pieces end at the same places whatever else runs: at multiples of the chunk size and where the policy evicts.
        """
        assert self.state is not None
        state, bounds = self.state, self._bounds
        eviction = bounds.policy.eviction(state.length)
        if eviction is not None:
            state.evict(*eviction)
            self.evictions += 1
        fed = state.position
        pending = len(self.tokens) - fed
        most = min(bounds.chunk_tokens - fed % bounds.chunk_tokens, bounds.abilities.max_chunk_tokens)
        room = bounds.policy.room(state.length)
        if room is not None:
            most = min(most, room)
        if pending == 1:
            if self._resting:
                self._resting -= 1
                self.proposal = ()
            else:
                self.proposal = self._propose(self._drafter, room) if self._drafter else ()
            return Chunk(state, [self.tokens[-1], *self.proposal], len(self.proposal) + 1)
        count = min(pending, most)
        if count > room_tokens:
            return None
        self.proposal = ()
        self.turns += 1
        return Chunk(state, self.tokens[fed : fed + count].tolist(), 1 if count == pending else 0)

    def is_decoding(self) -> bool:
        """Whether only its newest token is still to be fed."""
        assert self.state is not None
        return len(self.tokens) - self.state.position == 1

    def _propose(self, drafter: Drafter, room: int | None) -> Tokens[int]:
        """At most as many tokens as can be verified without an eviction, a full state or a wasted row."""
        assert self.state is not None
        bounds = self._bounds
        held = bounds.storage.capacity_tokens - self.state.length
        limit = min(self._most_drafted, held - 1, self._last - len(self.tokens) - 1)
        if room is not None:
            limit = min(limit, room - 1)
        proposal = drafter.propose(self.tokens, limit) if limit > 0 else ()
        if not len(proposal):
            self._resting = proposal.steps if isinstance(proposal, Rest) else 0
            return ()
        if len(proposal) > limit or min(proposal) < 0 or max(proposal) >= bounds.abilities.vocabulary:
            raise InvalidInput(f"the drafter proposed {len(proposal)} tokens of {limit} allowed, or unknown ones")
        return list(proposal)

    def take(self, logits: Logits) -> None:
        """The rows after a chunk: choose, accept the proposal while it is equal, and forget the rest."""
        assert self.state is not None
        self._verified = self.state.position - len(self.proposal)
        if len(logits) == 0:
            return
        self.is_suspect = False
        if self.generated == 0:
            self._keep_prefix()  # now, so that others who come meanwhile find it
        before, accepted = len(self.tokens), 0
        self.proposed += len(self.proposal)
        for place, row in enumerate(logits):
            allowed = self._grammar.allowed() if self._grammar else None
            token = self._sampler.choose(row, len(self.tokens), allowed)
            matches = place < len(self.proposal) and token == self.proposal[place]
            self._accept(token, row)
            if self.is_done or not matches:
                break
            accepted += 1
            self._verified += 1
            self.accepted += 1
        if self.is_done:
            return
        if self._drafter is not None and not self._resting:
            self._drafter.observe(self.tokens[before:])
        if len(self.proposal) > accepted:
            self.state.rewind(len(self.proposal) - accepted)
        self._give()

    def _accept(self, token: int, row: NDArray[np.float32]) -> None:
        self._latest = perf_counter()
        if self.generated == 0:
            self._first = self._latest
        if token in self._ends:
            self.finish("stop")
            return
        self.tokens.append(token)
        self._new.append(token)
        self._sampler.observe(token)
        if self._sampler.sampling.logprobs is not None:
            self._logprobs.append(self._sampler.logprob(row, token))
        passed = self._stops.push(self._detokeniser.push(token))
        self._text += passed.text
        if self._grammar is not None and not passed.stopped:
            self._grammar.advance(token)
        if passed.stopped:
            self._conclude("stop")
        elif self._grammar is not None and self._grammar.is_finished():
            self.finish("stop")
        elif len(self.tokens) >= self._last:
            self.finish("length")

    def _give(self) -> None:
        """Hand over what is certain. Tokens travel with their text, so held-back text holds back its tokens."""
        if self._text:
            self.pieces.append(Piece(self._text, tuple(self._new), tuple(self._logprobs)))
            self._text, self._new, self._logprobs = "", [], []

    def finish(self, reason: FinishReason) -> None:
        """The answer ends here; what was held back is given out, unless a stop string shows up in it."""
        if self.is_done:
            return
        passed = self._stops.push(self._detokeniser.flush())
        self._text += passed.text if passed.stopped else passed.text + self._stops.flush()
        self._conclude("stop" if passed.stopped else reason)

    def _conclude(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.pieces.append(Piece(self._text, tuple(self._new), tuple(self._logprobs), reason, self.timings()))
        self._release()

    def fail(self, error: BaseException) -> None:
        """The answer cannot go on; whoever reads it gets `error` after what was given out before."""
        if not self.is_done:
            self.error = error
            self._release()

    def _release(self) -> None:
        drafter, self._drafter = self._drafter, None
        try:
            if self.error is None:
                self._keep_prefix()
        finally:
            state, self.state = self.state, None
            try:
                if state is not None:
                    state.close()
            finally:
                if drafter is not None:
                    drafter.close()

    def _keep_prefix(self) -> None:
        state = self.state
        if self._reuse is not None and state is not None and state.position == state.length:
            self._reuse.keep(state, self.tokens[: self._verified])

    def timings(self) -> Timings:
        now = perf_counter()
        started = self._started or now
        first = self._first or None
        return Timings(
            queue_s=started - self._asked,
            first_token_s=first - self._asked if first else None,
            total_s=now - self._asked,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.cached_tokens,
            prefill_s=(first or now) - started,
            tokens=self.generated,
            decode_s=self._latest - first if first else 0.0,
            proposed=self.proposed,
            accepted=self.accepted,
        )
