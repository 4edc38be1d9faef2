"""Requests that feed a whole text and generate nothing, such as embeddings and rankings.

Such a request runs in the scheduler like any other. Decoders process the text in chunks, encoders as a whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from edgekit.contracts.engine import Chunk
from edgekit.errors import Cancelled
from edgekit.runtime.generation.sampling import Sampler, Sampling
from edgekit.runtime.generation.stopping import Stopping
from edgekit.runtime.request import Request, RequestLimits
from edgekit.runtime.stream import Stream

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits
    from edgekit.runtime.driver import Driver
    from edgekit.runtime.generation.tokenizer import Codec

Item = TypeVar("Item")
Result = TypeVar("Result")
_MOST_QUEUED = 64  # requests of one job that are queued at once


class ReadingRequest(Request, ABC):
    """A request that feeds one text and reads logits or hidden states of it."""

    generates = False
    reads_hidden: ClassVar[bool] = False

    def __init__(self, limits: RequestLimits, codec: Codec, tokens: Sequence[int], second: int = 0) -> None:
        """`second`: the index of the first token of a pair's second text; 0 for a single text."""
        sampler = Sampler(Sampling(logit_bias={}), limits.capabilities.vocabulary, [])
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

    def next_chunk(self, max_tokens: int) -> Chunk | None:
        """Return the next chunk, which asks for the rows that are read."""
        assert self.state is not None
        fed, most = self.state.position, min(self.limits.chunk_tokens, self.limits.capabilities.max_chunk_tokens)
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


class ReadingJob(ABC, Generic[Item, Result]):
    """Requests that read several texts, the longest first, so that texts of similar length run together.

    They are queued in groups, because each waiting request takes memory. A group is queued as a whole or not at all.
    """

    def __init__(self, driver: Driver, items: Sequence[Item], tokens: Sequence[int]) -> None:
        """Queue the first group. `items`: one per request, from which it is made; `tokens`: of every item."""
        self._driver, self._items, self._is_cancelled = driver, items, False
        self.tokens = list(tokens)
        self._waiting = sorted(range(len(items)), key=lambda index: -tokens[index])
        self._found: dict[int, Result] = {}
        self._group: dict[int, Request] = {}
        self.streams: list[Stream] = []
        self.submit_next()

    @abstractmethod
    def request(self, item: Item) -> Request:
        """Make the request that reads an item."""

    @abstractmethod
    def result(self, request: Any) -> Result | None:
        """Return the result of a request; None unless it has ended well."""

    def submit_next(self) -> list[Stream]:
        """Queue the next group once the one before has ended; return its streams, none after the last group."""
        self._collect()
        if self._is_cancelled:
            self._waiting.clear()
        group = {index: self.request(self._items[index]) for index in self._waiting[:_MOST_QUEUED]}
        streams = [Stream(self._driver, request) for request in group.values()]
        self._driver.submit(*group.values())
        self._group, self._waiting, self.streams = group, self._waiting[_MOST_QUEUED:], streams
        return streams

    def wait(self) -> None:
        """Advance all queued requests until the last of this job's has ended."""
        while self.streams:
            for stream in self.streams:
                for _ in stream:
                    pass
            self.submit_next()

    def in_order(self) -> list[Result]:
        """Return the results in the order of the items, once every request has ended."""
        self._collect()
        if len(self._found) < len(self._items):
            raise Cancelled("the texts were cancelled before their end; ask again")
        return [self._found[index] for index in range(len(self._items))]

    def cancel(self) -> None:
        """Cancel all requests. Any thread may call this."""
        self._is_cancelled = True
        for stream in self.streams:
            stream.cancel()

    def cancel_soon(self) -> None:
        """Like `cancel`, without waiting for any lock."""
        self._is_cancelled = True
        for stream in self.streams:
            stream.cancel_soon()

    def _collect(self) -> None:
        for index, request in self._group.items():
            found = self.result(request)
            if found is not None:
                self._found[index] = found
        self._group = {}
