"""Requests that feed a whole text and generate nothing, such as embeddings and rankings.

Such a request runs in the scheduler like any other. Decoders process the text in chunks, encoders as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from edgekit.contracts.engine import Chunk
from edgekit.runtime.generation.sampling import Sampler, Sampling
from edgekit.runtime.generation.stopping import Stopping
from edgekit.runtime.request import Request, RequestLimits
from edgekit.runtime.stream import Stream

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits
    from edgekit.runtime.driver import Driver
    from edgekit.runtime.generation.tokenizer import Codec


class ReadingRequest(Request, ABC):
    """A request that feeds one text and reads logits or hidden states of it."""

    generates = False
    reads_hidden: ClassVar[bool] = False

    def __init__(self, limits: RequestLimits, codec: Codec, tokens: Sequence[int], second: int = 0) -> None:
        """`second`: the index of the first token of a pair's second text; 0 for a single text."""
        sampler = Sampler(Sampling(logit_bias={}), limits.abilities.vocabulary, [])
        # The base class wants room for an answer after the prompt. There is none here, so it gets one token less.
        super().__init__(limits, tokens[:-1] or tokens, sampler, Stopping(), codec.stream())
        self.tokens, self.prompt_tokens, self._second = array("i", tokens), len(tokens), second

    @abstractmethod
    def rows(self, fed: int, count: int) -> int:
        """Return how many of the last rows of a chunk are read: of `count` tokens, after `fed` ones."""

    @abstractmethod
    def read(self, rows: Logits) -> None:
        """Read the rows of one chunk."""

    @abstractmethod
    def end(self) -> None:
        """Make the result after the last chunk."""

    @property
    def num_pending(self) -> int:
        """More than one token, so that the scheduler treats the request as prefill until its end."""
        return 2

    def next_chunk(self, max_tokens: int) -> Chunk | None:
        """Return the next chunk, which asks for the rows that are read."""
        assert self.state is not None
        fed, most = self.state.position, min(self.limits.chunk_tokens, self.limits.abilities.max_chunk_tokens)
        count = min(len(self.tokens) - fed, most - fed % most)
        if count > max_tokens:
            return None
        self.counters.prefill_chunks += 1
        tokens = self.tokens[fed : fed + count].tolist()
        return Chunk(self.state, tokens, self.rows(fed, count), hidden=self.reads_hidden, second=self._second)

    def take(self, logits: Logits) -> None:
        """Read the rows of a chunk; the request ends with the text."""
        assert self.state is not None
        self.is_suspect = False
        if len(logits):
            self.read(logits)
        if self.state.position == len(self.tokens):
            self.end()
            self.finish("stop")


class ReadingJob:
    """Pending requests of several texts."""

    def __init__(self, driver: Driver, requests: Sequence[ReadingRequest]) -> None:
        self._requests = list(requests)
        self.streams = [Stream(driver, request) for request in requests]

    @property
    def tokens(self) -> list[int]:
        """The number of tokens of each text."""
        return [request.prompt_tokens for request in self._requests]

    def wait(self) -> None:
        """Advance all queued requests until these have ended."""
        for stream in self.streams:
            for _ in stream:
                pass

    def cancel(self) -> None:
        """Cancel all requests. Any thread may call this."""
        for stream in self.streams:
            stream.cancel()

    def cancel_soon(self) -> None:
        """Like `cancel`, without waiting for any lock."""
        for stream in self.streams:
            stream.cancel_soon()


def longest_first(tokens: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of texts, the longest first."""
    return sorted(range(len(tokens)), key=lambda place: -len(tokens[place]))


def submit_longest_first(driver: Driver, requests: Sequence[ReadingRequest]) -> None:
    """Submit requests. Texts of similar length run together, so the longest come first."""
    for place in longest_first([request.tokens for request in requests]):
        driver.submit(requests[place])
