"""`AsyncRuntime`: a runtime for asyncio. Its own thread runs the engine, so the event loop never waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from edgekit.common.log import log
from edgekit.common.options import one_of
from edgekit.errors import RuntimeClosed
from edgekit.runtime.lifetimes import OwnedByProcess
from edgekit.runtime.open import open_runtime
from edgekit.runtime.open_options import OpenOptions
from edgekit.runtime.prompts import Prompt, check_messages, check_text
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.scoring import Score
from edgekit.runtime.stream import Answer, Stream
from edgekit.runtime.text_assembler import Piece

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Unpack

    from edgekit.common.histogram import Histogram
    from edgekit.runtime.embedding import EmbeddingOptions, Vectors
    from edgekit.runtime.generation.chat_template import Message
    from edgekit.runtime.metrics import Metrics
    from edgekit.runtime.options import Options
    from edgekit.runtime.reranking import Ranked, RerankingOptions

# The engine and the event loop compete for the interpreter and the cores. So the engine waits until the readers of an
# answer's first piece have passed it on, at most this long. Later pieces overlap with the next step.
_FIRST_PIECE_S = 0.003
_STALLED_S = 10.0  # seconds without a step while requests wait

Result = TypeVar("Result", covariant=True)


class _Job(Protocol[Result]):
    """Requests that were queued together, such as `Embedding`, `Ranking` and `Scoring`."""

    @property
    def streams(self) -> Sequence[Stream]: ...
    def submit_next(self) -> Sequence[Stream]: ...
    def results(self) -> Result: ...


class AsyncRuntime(OwnedByProcess):
    """A runtime for one event loop. It closes the runtime that it wraps.

    Example:
        async with await AsyncRuntime.open("my-artifact") as runtime:
            stream = await runtime.submit("Once", max_tokens=20)  # refuses here, before the first piece
            async for piece in stream:
                print(piece.text, end="")
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        self._active: dict[Stream, _PieceReader] = {}
        self._changed = Condition()
        self._is_closing = False
        self.failure: BaseException | None = None  # the error that ended the thread, and with it this runtime
        self._thread: Thread | None = None

    @classmethod
    async def open(cls, path: str | Path, options: OpenOptions | None = None, **given: Any) -> AsyncRuntime:
        """Open an artifact as `edgekit.open` does, without blocking the event loop.

        >>> async with await AsyncRuntime.open("demo.edgekit") as runtime:
        ...     async for piece in runtime.stream("def add(a, b):", max_tokens=16):
        ...         print(piece.text, end="")
        """
        opening = asyncio.ensure_future(asyncio.to_thread(open_runtime, path, one_of(options, OpenOptions, given)))
        try:
            return cls(await asyncio.shield(opening))
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)  # a thread cannot be stopped: close the runtime when it is open
            raise

    async def submit(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """Queue a request and return its stream. Raises the same errors as `Runtime.submit`.

        The request runs at once; its pieces stay in memory until they are read.
        """
        return (await self.submit_several(prompt, 1, tools=tools, template_options=template_options, **options))[0]

    async def submit_several(
        self,
        prompt: Prompt,
        count: int,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> list[AsyncStream]:
        """Queue `count` requests for independent answers to one prompt; their seeds are `seed` and the next ones."""
        loop = asyncio.get_running_loop()

        def submitted() -> list[AsyncStream]:
            streams = self.runtime.submit_several(
                prompt, count, tools=tools, template_options=template_options, **options
            )
            return [self._register(stream, loop) for stream in streams]

        # Encoding and rendering take time: they run in a thread, which also lets the engine begin.
        return await asyncio.to_thread(submitted)

    async def generate(self, prompt: str, **options: Unpack[Options]) -> Answer:
        """Continue the text `prompt`, as `Runtime.generate` does."""
        check_text(prompt)
        return await self._answered(await self.submit(prompt, **options))

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Answer `messages`, as `Runtime.chat` does."""
        check_messages(messages)
        return await self._answered(
            await self.submit(messages, tools=tools, template_options=template_options, **options)
        )

    async def complete(self, tokens: Sequence[int], **options: Unpack[Options]) -> Answer:
        """Continue a list of token ids, as `Runtime.complete` does."""
        return await self._answered(await self.submit(tokens, **options))

    async def stream(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> AsyncIterator[Piece]:
        """Yield pieces as they come. Leaving the loop, or cancelling the task, cancels the request.

        Errors come with the first piece; `submit` raises them earlier.
        """
        async with await self.submit(prompt, tools=tools, template_options=template_options, **options) as stream:
            async for piece in stream:
                yield piece

    def metrics(self) -> Metrics:
        """Return the counters since the runtime was opened."""
        return self.runtime.metrics()

    def histograms(self) -> dict[str, Histogram]:
        """Return the distributions of latencies and lengths, as `Runtime.histograms` does."""
        return self.runtime.histograms()

    async def score(
        self, prompt: Prompt, continuations: Sequence[str | Sequence[int]], *, adapter: str | None = None
    ) -> list[Score]:
        """Return the log-probabilities of each of `continuations` after `prompt`, as `Runtime.score` does."""
        return await self.results(
            await asyncio.to_thread(self.runtime.submit_score, prompt, continuations, adapter=adapter)
        )

    async def prompt_logprobs(self, prompt: Prompt, *, top: int = 0, adapter: str | None = None) -> Score:
        """Return the log-probabilities of the tokens of `prompt`, except its first."""
        submit = self.runtime.submit_prompt_logprobs
        return (await self.results(await asyncio.to_thread(submit, prompt, top=top, adapter=adapter)))[0]

    async def embed(self, texts: Sequence[str | Sequence[int]], **options: Unpack[EmbeddingOptions]) -> Vectors:
        """Return one vector for each text, as `Runtime.embed` does."""
        return await self.results(await asyncio.to_thread(lambda: self.runtime.submit_embed(texts, **options)))

    async def rerank(self, query: str, documents: Sequence[str], **options: Unpack[RerankingOptions]) -> list[Ranked]:
        """Score documents for a query, as `Runtime.rerank` does."""
        submit = self.runtime.submit_rerank
        return await self.results(await asyncio.to_thread(lambda: submit(query, documents, **options)))

    async def results(self, job: _Job[Result]) -> Result:
        """Wait for what `Runtime.submit_embed`, `submit_rerank` or `submit_score` queued, and return its results."""
        loop, streams = asyncio.get_running_loop(), job.streams
        while streams:
            for stream in [self._register(stream, loop) for stream in streams]:
                async for _ in stream:
                    pass
            streams = await asyncio.to_thread(job.submit_next)
        return job.results()

    def problem(self) -> str | None:
        """Say why answers cannot be expected now; None while all is well."""
        if self.failure is not None:
            return f"its thread ended by {type(self.failure).__name__}"
        stalled_s = self.runtime.stalled_s()
        return f"requests wait, and no step has run for {stalled_s:.0f} s" if stalled_s > _STALLED_S else None

    def cancel_all(self) -> None:
        """End all answers soon; their readers get the text so far and the finish reason `cancelled`."""
        with self._changed:
            streams = list(self._active)
        for stream in streams:
            stream.cancel_soon()

    async def close(self) -> None:
        """Cancel all requests, end the thread and close the runtime."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        await asyncio.to_thread(self.runtime.close)  # before the thread is waited for, since it ends a running step
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncRuntime:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _answered(self, stream: AsyncStream) -> Answer:
        async with stream:
            return await stream.answer()

    def _register(self, stream: Stream, loop: asyncio.AbstractEventLoop) -> AsyncStream:
        """Let the thread advance a stream and tell an event loop about its pieces."""
        reader = _PieceReader(loop)
        with self._changed:
            if self.failure is not None:
                raise RuntimeClosed(f"this runtime is closed: {self.problem()}; open the artifact again")
            if self._thread is None:
                thread = Thread(target=self._run, name="edgekit", daemon=True)
                thread.start()  # raises where the system allows no more threads
                self._thread = thread
            self._active[stream] = reader
            self._changed.notify_all()
        return AsyncStream(stream, reader, self._forget)

    def _forget(self, stream: Stream) -> None:
        with self._changed:
            self._active.pop(stream, None)

    def _run(self) -> None:
        """Drive in the thread until the runtime is closed. An error outside any request ends all of them."""
        try:
            while self._drive():
                pass
        except BaseException as error:
            log.critical("the thread of the runtime ended by %s", error, exc_info=True)
            self._fail(error)

    def _drive(self) -> bool:
        """Step while there are streams, and wake the readers of each; False: the runtime is closed."""
        with self._changed:
            while not self._active and not self._is_closing:
                self._changed.wait()
            if self._is_closing:
                for stream in list(self._active):
                    stream.cancel_soon()
            active = dict(self._active)
        if active:
            self.runtime.step()
        self._wake(active)
        return bool(active) or not self._is_closing

    def _fail(self, error: BaseException) -> None:
        """Tell every reader that no piece will come, and close the runtime."""
        with self._changed:
            self.failure = error
            active, self._active = self._active, {}
        closed = RuntimeClosed(f"this runtime was closed: {self.problem()}; open the artifact again")
        for reader in active.values():
            reader.error = closed
            with suppress(RuntimeError):  # the event loop was closed
                reader.loop.call_soon_threadsafe(reader.news.set)
        self.runtime._driver.stop_driving()
        self.runtime.close()

    def _wake(self, active: Mapping[Stream, _PieceReader]) -> None:
        """Tell the readers of streams that have pieces. These stay in the stream, so they are counted until read.

        Each event loop is woken once: it would handle one reader before the next is woken, while the engine waits.
        Streams that ended are forgotten last, since an error until then is told to their readers too.
        """
        ready: dict[asyncio.AbstractEventLoop, list[tuple[Stream, _PieceReader]]] = {}
        done = {stream for stream in active if stream.is_done}
        for stream, reader in active.items():
            if stream not in done and (not stream.has_pieces or reader.news.is_set()):
                continue
            ready.setdefault(reader.loop, []).append((stream, reader))
        first = [reader for readers in ready.values() for _, reader in readers if not reader.has_begun]
        for reader in first:
            reader.has_begun = True
        for loop, readers in ready.items():
            try:
                loop.call_soon_threadsafe(_set_all, [reader.news for _, reader in readers])
            except RuntimeError:  # the event loop was closed
                for stream, _ in readers:
                    self._forget(stream)
                    stream.cancel_soon()
        for stream in done:
            self._forget(stream)
        until = monotonic() + _FIRST_PIECE_S
        for reader in first:
            reader.has_read.wait(max(0.0, until - monotonic()))


class _PieceReader:
    """The reader of a stream, as the thread sees it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.news = asyncio.Event()  # the stream has pieces, or ended
        self.error: BaseException | None = None  # no piece will come, because the thread has ended
        self.has_begun = False  # the reader was told about its first piece
        self.has_read = Event()  # the reader has handed out its piece and asks for another


class AsyncStream:
    """An answer that is being generated, for `async for`. Closing it, or dropping it, cancels the request."""

    def __init__(self, stream: Stream, reader: _PieceReader, forget: Callable[[Stream], None]) -> None:
        self._stream, self._reader, self._forget = stream, reader, forget
        self._is_done = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Piece:
        while not self._is_done:
            self._reader.news.clear()
            try:
                pieces = self._stream.poll(1)
            except BaseException:
                self._is_done = True
                raise
            if pieces:
                self._is_done = pieces[0].finish_reason is not None
                return pieces[0]
            if self._reader.error is not None:
                self._is_done = True
                raise self._reader.error
            if self._reader.has_begun:
                self._reader.has_read.set()
            await self._reader.news.wait()
        raise StopAsyncIteration

    async def answer(self) -> Answer:
        """Read the rest of the stream and return the whole answer, including the pieces that were read before."""
        async for _ in self:
            pass
        return self._stream.answer()

    @property
    def seed(self) -> int:
        """The seed that reproduces this answer."""
        return self._stream.seed

    @property
    def prompt_tokens(self) -> int:
        return self._stream.prompt_tokens

    def cancel(self) -> None:
        """End the answer soon; the reader gets the text so far and the finish reason `cancelled`."""
        self._stream.cancel_soon()

    async def close(self) -> None:
        """Cancel the request; no further piece comes."""
        self._end()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        self._is_done = True
        self._reader.has_read.set()
        self._forget(self._stream)
        self._stream.cancel_soon()


def _set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()


def _close_opened(opening: asyncio.Future[Runtime]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
