"""One generation request: its tokens, its engine state, its status and its counters."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from edgekit.common.log import log
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import LEAST_SCORED_BITS, NEWEST
from edgekit.errors import ContextExceeded, InvalidPrompt, Unsupported
from edgekit.runtime.decoding import Decoding
from edgekit.runtime.generation.stopping import FinishReason, Stopping
from edgekit.runtime.generation.tokenizer import ENDLESS_TOKENS, SHORTEN
from edgekit.runtime.metrics import RequestCounters, Timings
from edgekit.runtime.speculation.draft_method import DraftRequest
from edgekit.runtime.speculation.hidden_log import HiddenLog
from edgekit.runtime.text_assembler import TextAssembler

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.capabilities import Capabilities
    from edgekit.contracts.engine import Logits, State
    from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
    from edgekit.runtime.generation.sampling import Sampler
    from edgekit.runtime.generation.structured import Grammar
    from edgekit.runtime.generation.tokenizer import Detokeniser
    from edgekit.runtime.prefix_cache.tree import Reuse
    from edgekit.runtime.speculation.controller import DrafterFactory


class Status(Enum):
    """The stage of a request. Only a running request has a state."""

    WAITING = "waiting"  # for a state; also after a failed batched call, until it is admitted again
    RUNNING = "running"
    FINISHED = "finished"  # with a `finish_reason`
    FAILED = "failed"  # with an `error`


_ENDED = (Status.FINISHED, Status.FAILED)


def check_cache(policy: KVEvictionPolicy, capabilities: Capabilities, kv_bits: int) -> None:
    """Refuse a width that the engine cannot store, and a window for which it cannot evict or score cached tokens."""
    if kv_bits not in capabilities.kv_bits:
        known = ", ".join(map(str, capabilities.kv_bits))
        fix = "; export with --kv-bits for another width" if len(capabilities.kv_bits) == 1 else ""
        raise Unsupported(f"kv_bits: this artifact cannot store {kv_bits} bits; it can store {known}{fix}")
    if policy.window is not None and not capabilities.can_evict:
        raise Unsupported("window: this engine cannot evict tokens; open it without a window")
    if policy.is_scored and policy.keep not in capabilities.scorers:
        if policy.keep in capabilities.scorers_on_request:
            raise Unsupported(f"keep: {policy.keep} needs a runtime that was opened for it; open with that `keep`")
        known = ", ".join((NEWEST, *capabilities.scorers, *capabilities.scorers_on_request))
        raise Unsupported(f"keep: this engine cannot keep tokens by {policy.keep}; it can by {known}")
    if not policy.widths((kv_bits,)):
        raise Unsupported(
            f"keep: a kept key is rotated at every eviction, which {kv_bits} bits do not bear for long; "
            f"use a cache of {LEAST_SCORED_BITS} bits or more"
        )


class RequestLimits(NamedTuple):
    """The limits of one request."""

    capabilities: Capabilities
    policy: KVEvictionPolicy
    kv_config: KVCacheConfig
    chunk_tokens: int
    eos: frozenset[int]

    @property
    def max_length(self) -> int | None:
        """The most tokens that prompt and answer can have together; None: no limit."""
        limits = (self.capabilities.max_position, None if self.policy.window else self.kv_config.capacity_tokens)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def prompt_tokens(self) -> int:
        """The most tokens that a prompt may have, so that one token of an answer fits."""
        return ENDLESS_TOKENS if self.max_length is None else self.max_length - 1

    @property
    def text_tokens(self) -> int:
        """The most tokens of a text that is read as a whole, without an answer."""
        limits = (self.kv_config.capacity_tokens, self.policy.window, self.max_length)
        return min(limit for limit in limits if limit is not None)


class Request:
    """A request that the scheduler advances: `start`, then `next_chunk` and `take` in every step until it ends."""

    generates = True  # False: it only reads text, so its steps say nothing about drafting

    def __init__(
        self,
        limits: RequestLimits,
        prompt: Sequence[int],
        sampler: Sampler,
        stopping: Stopping,
        detokeniser: Detokeniser,
        *,
        grammar: Grammar | None = None,
        drafter_factory: DrafterFactory | None = None,
        reuse: Reuse | None = None,
        priority: int = 0,
    ) -> None:
        vocabulary, max_length = limits.capabilities.vocabulary, limits.max_length
        if not prompt:
            raise InvalidPrompt("the prompt has no tokens; give at least one")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise InvalidPrompt(f"the prompt holds a token outside the vocabulary of {vocabulary}")
        if max_length is not None and len(prompt) >= max_length:
            raise ContextExceeded(len(prompt), max_length - 1, SHORTEN)
        asked = None if stopping.max_tokens is None else len(prompt) + stopping.max_tokens
        # The request; constant.
        self.limits, self.prompt_tokens = limits, len(prompt)
        # With a window and no `max_tokens`, the answer is as long as the capacity of a state.
        self.max_length = min(
            (length for length in (max_length, asked) if length is not None),
            default=len(prompt) + limits.kv_config.capacity_tokens,
        )
        self._stop_tokens = frozenset(stopping.stop_tokens)
        self._end_tokens = self._stop_tokens | (frozenset() if stopping.ignore_eos else limits.eos)
        self._reuse = reuse
        # Progress so far.
        self.status, self.counters = Status.WAITING, RequestCounters(submitted_at=perf_counter())
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.is_cancelled = False
        self.is_suspect = False  # it was in a failed call; its next call is for it alone
        self.state: State | None = None
        self.tokens = array("i", prompt)  # the prompt, then the answer: four bytes a token
        self.text = TextAssembler(detokeniser, stopping.stop)
        self.decoding = Decoding(sampler, grammar)
        self._hidden = HiddenLog(limits.capabilities.feature_width)
        self._num_verified = 0  # leading tokens of `tokens` that the state was fed
        self.num_computed = 0  # tokens of the latest chunk, with those that the state replays for its recurrent part
        self.priority, self.rank = priority, 0.0  # the scheduler ranks what is queued
        if drafter_factory is not None:
            draft_request = DraftRequest(
                prompt,
                sampler,
                limits.policy,
                self.max_length,
                lambda: self.state,
                grammar,
                self._end_tokens,
                self._hidden,
            )
            self.decoding.start_drafter(drafter_factory, draft_request, limits.capabilities)

    @property
    def is_done(self) -> bool:
        return self.status in _ENDED

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """True if the state lacks one token. What only reads text is prefill until its end."""
        return self.generates and self.state is not None and len(self.tokens) - self.state.position == 1

    def start(self, state: State) -> None:
        """Run on the empty `state`; restore the longest cached prefix of the prompt into it."""
        self.state, self.status = state, Status.RUNNING
        self.counters.started_at = self.counters.started_at or perf_counter()
        if self._reuse is not None:
            limits = self.limits
            most = (len(self.tokens) - 1, limits.kv_config.capacity_tokens, limits.policy.remaining_capacity(0))
            restorable = min(count for count in most if count is not None)
            self._num_verified = self._reuse.restore(state, self.tokens, restorable)
            self.counters.cached_tokens = self._num_verified - state.num_replayed

    def next_chunk(self, max_tokens: int) -> Chunk | None:
        """Return the tokens to feed next, evicting first where the window is full.

        None: the next piece of the prompt has more than `max_tokens` tokens. A prompt is cut at multiples of the chunk
        size and where the policy evicts, so the cuts do not depend on other requests.
        """
        assert self.state is not None
        state, limits, fed = self.state, self.limits, self.state.position
        pending = len(self.tokens) - fed
        if limits.policy.eviction(state.length) and self.num_generated == 0 and limits.policy.is_renewed(fed):
            self._keep_prefix()  # so that a prompt with the same long beginning reads at most one window again
        self.counters.evictions += limits.policy.make_room(state, self.tokens)
        remaining = limits.policy.remaining_capacity(state.length)
        if pending == 1:
            proposal = self._propose(state, remaining)
            self.num_computed = state.num_replayed + 1 + len(proposal)
            hidden = self._hidden.ask(len(proposal) + 1, len(self.tokens) + 1 + len(proposal))
            return Chunk(state, [self.tokens[-1], *proposal], len(proposal) + 1, features=hidden)
        to_boundary = limits.chunk_tokens - fed % limits.chunk_tokens
        count = min(pending, to_boundary, limits.capabilities.max_chunk_tokens)
        if remaining is not None:
            count = min(count, remaining)
        if count > max_tokens:
            return None
        self.decoding.proposal = ()
        self.counters.prefill_chunks += 1
        hidden = self._hidden.ask(count, len(self.tokens) + 1, pending - count)
        return Chunk(state, self.tokens[fed : fed + count].tolist(), 1 if count == pending else 0, features=hidden)

    def _propose(self, state: State, remaining: int | None) -> Sequence[int]:
        """Draft at most as many tokens as one chunk can verify without an eviction and within `max_length`."""
        limit = min(self.limits.kv_config.capacity_tokens - state.length - 1, self.max_length - len(self.tokens) - 1)
        return self.decoding.propose(self.tokens, limit if remaining is None else min(limit, remaining - 1))

    def take(self, logits: Logits) -> None:
        """Choose tokens from the logits of a chunk; accept the right start of its proposal and rewind the rest."""
        assert self.state is not None
        decoding, counters = self.decoding, self.counters
        proposal = decoding.proposal
        self._num_verified = self.state.position - len(proposal)
        if len(logits) == 0:
            self._hidden.keep(self.state.position)
            return
        self.is_suspect = False
        if self.num_generated == 0:
            self._keep_prefix()  # now, so that requests during this answer can reuse it
            if len(self.tokens) >= self.max_length:  # no token was asked for
                self.finish("length")
                return
        num_tokens, accepted = len(self.tokens), 0
        counters.proposed += len(proposal)
        for index, token_logits in enumerate(logits):
            token = decoding.choose(token_logits, len(self.tokens))
            is_right = index < len(proposal) and token == proposal[index]
            self._append(token, token_logits)
            if self.is_done or not is_right:
                break
            accepted += 1
            self._num_verified += 1
            counters.accepted += 1
        if self.is_done:
            return
        self._hidden.keep(self.state.position, len(proposal) - accepted)
        decoding.learn(self.tokens[num_tokens:])
        if len(proposal) > accepted:
            self.state.rewind(len(proposal) - accepted)
        self.text.emit()

    def _append(self, token: int, logits: NDArray[np.float32]) -> None:
        """Add `token` to the answer; end the answer at a stop, the limit, or the end of its format."""
        counters, grammar = self.counters, self.decoding.grammar
        counters.last_token_at = perf_counter()
        if self.num_generated == 0:
            counters.first_token_at = counters.last_token_at
        if token in self._end_tokens:
            self.text.stop = token if token in self._stop_tokens else None
            self.finish("stop")
            return
        self.tokens.append(token)
        if self.text.append(token, self.decoding.append(token, logits)):
            self._end("stop")
            return
        if grammar is not None:
            grammar.advance(token)
        if grammar is not None and grammar.is_finished():
            self.finish("stop")
        elif len(self.tokens) >= self.max_length:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """End the answer; release the held-back text, up to a stop string in it."""
        if not self.is_done:
            self._end("stop" if self.text.flush() else reason)

    def cancel(self) -> None:
        """End the answer as cancelled, with the text so far if it can be decoded."""
        try:
            self.finish("cancelled")
        except Exception as error:
            log.warning("the text of a cancelled answer is incomplete: %s", type(error).__name__)
            self._end("cancelled")

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.text.emit_last(reason, self.timings())
        self.status = Status.FINISHED
        self._release()

    def fail(self, error: BaseException) -> None:
        """End the answer with `error`; its reader gets the queued pieces first. A cancelled one ends as cancelled."""
        if self.is_done:
            return
        if self.is_cancelled:
            self._num_verified = 0  # the state may be closed, so no prefix of it is kept
            self.cancel()
        else:
            self.status, self.error = Status.FAILED, error
            self._release()

    def requeue(self, error: BaseException) -> None:
        """Queue again after a failed batched call, for a call alone. Fail after two failures in a row."""
        if self.is_suspect:
            self.fail(error)
            return
        state, self.state = self.state, None
        self.status, self.is_suspect, self._num_verified = Status.WAITING, True, 0
        self.decoding.proposal = ()
        if state is not None:
            state.close()

    def timings(self) -> Timings:
        return self.counters.timings(self.prompt_tokens, self.num_generated)

    def _release(self) -> None:
        """Keep the prefix and close the parts. The answer has ended, so what fails here is only logged."""
        try:
            try:
                if self.error is None:
                    self._keep_prefix()
            finally:
                state, self.state = self.state, None
                try:
                    if state is not None:
                        state.close()
                finally:
                    self.decoding.close()
        except Exception as error:
            log.warning("an ended request could not be released in full: %s", type(error).__name__)

    def _keep_prefix(self) -> None:
        state = self.state
        if self._reuse is not None and state is not None and self._num_verified:
            self._reuse.keep(state, self.tokens[: self._num_verified])
