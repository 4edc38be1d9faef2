"""Log-probabilities of given text.

A scoring request runs in the scheduler like any other, but looks up the probabilities of given tokens instead of
choosing tokens. It feeds the prompt once, then each continuation, and rewinds to the prompt in between. It uses no
cached prefix of other requests, so equal calls give equal numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgekit.contracts.engine import Chunk
from edgekit.errors import ContextExceeded, InvalidInput
from edgekit.runtime.generation.sampling import Sampler, Sampling, best_tokens
from edgekit.runtime.generation.stopping import Stopping
from edgekit.runtime.reading_request import ReadingJob
from edgekit.runtime.request import Request, RequestLimits

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits, State
    from edgekit.runtime.driver import Driver
    from edgekit.runtime.generation.tokenizer import Codec

SCORED_TOKENS = 32  # logit rows of one chunk; more would exceed the planned memory


class Score(NamedTuple):
    """Natural-log probabilities of the tokens of one text, each given all tokens before it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_greedy: bool  # True if greedy decoding would give this text
    top: tuple[tuple[tuple[int, float], ...], ...] = ()  # the likeliest tokens at every position, if requested

    @property
    def total(self) -> float:
        """The log-probability of the whole text."""
        return sum(self.logprobs)

    @property
    def mean(self) -> float:
        """The mean log-probability of a token; `exp(-mean)` is the perplexity."""
        return self.total / len(self.logprobs) if self.logprobs else 0.0


class Branch(NamedTuple):
    """A prompt with one continuation; the tokens from index `start` on are scored."""

    tokens: Sequence[int]
    start: int


class ScoringRequest(Request):
    """A request that feeds the shared prompt of its branches, then each branch. All have the same `start`."""

    generates = False

    def __init__(self, limits: RequestLimits, codec: Codec, branches: Sequence[Branch], top: int = 0) -> None:
        self._branches, self._num_top = list(branches), top
        longest = max((branch.tokens for branch in self._branches), key=len)
        sampler = Sampler(Sampling(logit_bias={}), limits.capabilities.vocabulary, [])
        super().__init__(limits, list(longest[:-1]), sampler, Stopping(), codec.stream())
        self.scores: list[Score] = []
        self._logprobs_so_far: list[float] = []
        self._top_so_far: list[tuple[tuple[int, float], ...]] = []
        self._all_greedy = True

    def start(self, state: State) -> None:
        super().start(state)
        self.scores.clear()
        self._begin_branch()

    def next_chunk(self, max_tokens: int) -> Chunk | None:
        """Return the next chunk, of the prompt without logits, or of the current branch with logits for each token."""
        assert self.state is not None
        fed, capabilities = self.state.position, self.limits.capabilities
        branch = self._branches[len(self.scores)]
        shared = branch.start - 1
        most = min(self.limits.chunk_tokens, capabilities.max_chunk_tokens)
        if fed < shared:
            count = min(shared - fed, most - fed % most)
            rows = 0
        else:
            count = rows = min(len(branch.tokens) - 1 - fed, most, SCORED_TOKENS)
        if count > max_tokens:
            return None
        self.counters.prefill_chunks += 1
        return Chunk(self.state, list(branch.tokens[fed : fed + count]), rows)

    def take(self, logits: Logits) -> None:
        """Look up the given tokens in the logits of a chunk; at the end of a branch, rewind to the prompt."""
        assert self.state is not None
        self.is_suspect = False
        if len(logits) == 0:
            return
        branch, end = self._branches[len(self.scores)], self.state.position + 1
        following = np.array(branch.tokens[end - len(logits) : end], np.int64)
        rows = np.arange(len(following))
        largest = logits.max(axis=-1)
        given = logits[rows, following]
        # Sum in float64 row by row; a float64 copy of all rows would take twice their memory.
        sums = [np.exp(row.astype(np.float64) - top).sum() for row, top in zip(logits, largest, strict=True)]
        norms = [float(top) + float(np.log(total)) for top, total in zip(largest, sums, strict=True)]
        self._logprobs_so_far += [float(value) - norm for value, norm in zip(given, norms, strict=True)]
        if self._num_top:
            self._top_so_far += [
                tuple((int(token), float(row[token]) - norm) for token in best_tokens(row, self._num_top))
                for row, norm in zip(logits, norms, strict=True)
            ]
        self._all_greedy &= bool((logits.argmax(axis=-1) == following).all())
        if end == len(branch.tokens):
            self._end_branch(branch)

    def _end_branch(self, branch: Branch) -> None:
        assert self.state is not None
        tokens, logprobs = tuple(branch.tokens[branch.start :]), tuple(self._logprobs_so_far)
        self.scores.append(Score(tokens, logprobs, self._all_greedy, tuple(self._top_so_far)))
        if len(self.scores) == len(self._branches):
            self.finish("stop")
            return
        self.state.rewind(self.state.position - (branch.start - 1))
        self._begin_branch()

    def _begin_branch(self) -> None:
        self._logprobs_so_far, self._top_so_far, self._all_greedy = [], [], True


class Scoring(ReadingJob["list[int]", "list[Score]"]):
    """Pending scores of the continuations of one prompt. Those with the same start share one request and its prompt."""

    def __init__(
        self, driver: Driver, limits: RequestLimits, codec: Codec, branches: Sequence[Branch], top: int = 0
    ) -> None:
        self._limits, self._codec, self._branches, self._num_top = limits, codec, branches, top
        self._groups: dict[tuple[int, int], list[int]] = {}
        most = limits.capabilities.max_rewind
        for index, branch in enumerate(branches):
            _check(limits, index, branch)
            shares = most is None or len(branch.tokens) - branch.start <= most
            self._groups.setdefault((branch.start, -1 if shares else index), []).append(index)
        groups = list(self._groups.values())
        longest = [max(len(branches[index].tokens) for index in group) for group in groups]
        super().__init__(driver, groups, longest)

    def request(self, item: list[int]) -> ScoringRequest:
        return ScoringRequest(self._limits, self._codec, [self._branches[index] for index in item], self._num_top)

    def result(self, request: ScoringRequest) -> list[Score] | None:
        return request.scores if request.finish_reason == "stop" else None

    def scores(self) -> list[Score]:
        """Wait for all scores and return them in the order of the continuations."""
        self.wait()
        return self.results()

    def results(self) -> list[Score]:
        """Return the scores, once every request has ended."""
        by_index: dict[int, Score] = {}
        for group, scores in zip(self._groups.values(), self.in_order(), strict=True):
            by_index |= zip(group, scores, strict=True)
        return [by_index[index] for index in sorted(by_index)]


def _check(limits: RequestLimits, index: int, branch: Branch) -> None:
    last, vocabulary = limits.max_length, limits.capabilities.vocabulary
    rooms = (limits.kv_config.capacity_tokens, limits.policy.window, None if last is None else last - 1)
    room = min(room for room in rooms if room is not None)
    if len(branch.tokens) <= branch.start:
        raise InvalidInput(f"continuation {index} has no tokens; give text to score")
    if min(branch.tokens) < 0 or max(branch.tokens) >= vocabulary:
        raise InvalidInput(f"continuation {index} holds a token outside the vocabulary of {vocabulary}")
    if len(branch.tokens) - 1 > room:
        raise ContextExceeded(len(branch.tokens), room + 1, "shorten it, or export a larger context")


def branches_for(
    codec: Codec,
    text: tuple[str, bool] | None,
    tokens: Sequence[int],
    continuations: Sequence[str | Sequence[int]],
    most: int,
) -> list[Branch]:
    """Return one branch for each continuation of a prompt. `text`: the prompt, unless it is given as tokens."""
    texts = [each for each in continuations if isinstance(each, str)]
    if len(texts) == len(continuations) and text is not None:
        return branches_of(codec, *text, texts, most)
    given = [
        codec.encode(each, add_special_tokens=False, most=most) if isinstance(each, str) else list(each)
        for each in continuations
    ]
    return [Branch([*tokens, *each], len(tokens)) for each in given]


def branches_of(codec: Codec, prompt: str, add_special_tokens: bool, texts: Sequence[str], most: int) -> list[Branch]:
    """Encode each continuation together with the prompt, because a token may span the end of the prompt."""
    before = codec.encode(prompt, add_special_tokens=add_special_tokens, most=most)
    branches = []
    for text in texts:
        whole = codec.encode(prompt + text, add_special_tokens=add_special_tokens, most=most)
        shared = next((i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), len(before))
        # The first token of a text without bos has nothing before it, so it has no probability.
        branches.append(Branch(whole, max(1, min(shared, len(whole) - 1)) if text else len(whole)))
    return branches
