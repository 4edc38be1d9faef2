"""The same runtime for asyncio: one thread of its own drives the engine, so the event loop never waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

from edgekit.runtime.runtime import Prompt, Runtime
from edgekit.runtime.sequence import Piece
from edgekit.runtime.stream import Answer, Stream, joined

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Unpack

    from edgekit.runtime.options import Options
    from edgekit.runtime.template import Message

_Queue = asyncio.Queue["Piece | BaseException"]


class AsyncRuntime:
    """Wraps a runtime, which it closes with itself. Use it from one event loop."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._live: dict[Stream, tuple[asyncio.AbstractEventLoop, _Queue]] = {}
        self._changed = Condition()
        self._closing = False
        self._driver: Thread | None = None

    async def generate(self, prompt: str, **options: Unpack[Options]) -> Answer:
        """Go on from `prompt`."""
        return await self._answer(prompt, None, None, options)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Answer `messages`, rendered by the model's own template."""
        return await self._answer(messages, tools, template_options, options)

    async def complete(self, tokens: Sequence[int], **options: Unpack[Options]) -> Answer:
        """Go on from a list of tokens."""
        return await self._answer(tokens, None, None, options)

    async def stream(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> AsyncIterator[Piece]:
        """Pieces as they come; leaving the loop, or cancelling the task, releases everything."""
        stream = await self._submitted(prompt, tools, template_options, options)
        async for piece in self._pieces(stream):
            yield piece

    async def close(self) -> None:
        """Cancel what is running, end the thread and close the runtime."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        driver = self._driver
        if driver is not None:
            await asyncio.to_thread(driver.join)
        await asyncio.to_thread(self.runtime.close)

    async def __aenter__(self) -> AsyncRuntime:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _answer(
        self,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] | None,
        template_options: Mapping[str, Any] | None,
        options: Options,
    ) -> Answer:
        stream = await self._submitted(prompt, tools, template_options, options)
        return joined([piece async for piece in self._pieces(stream)], stream)

    async def _submitted(
        self,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] | None,
        template_options: Mapping[str, Any] | None,
        options: Options,
    ) -> Stream:
        """Encoding and templates take time of their own, so they run beside the event loop."""

        def submit() -> Stream:
            return self.runtime.submit(prompt, tools=tools, template_options=template_options, **options)

        return await asyncio.to_thread(submit)

    async def _pieces(self, stream: Stream) -> AsyncIterator[Piece]:
        queue: _Queue = asyncio.Queue()
        with self._changed:
            self._live[stream] = (asyncio.get_running_loop(), queue)
            if self._driver is None:
                self._driver = Thread(target=self._drive, name="edgekit", daemon=True)
                self._driver.start()
            self._changed.notify()
        try:
            while True:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            with self._changed:
                self._live.pop(stream, None)
            stream.cancel_soon()

    def _drive(self) -> None:
        """The thread: step while anybody waits, and hand each waiter its pieces."""
        while True:
            with self._changed:
                while not self._live and not self._closing:
                    self._changed.wait()
                if self._closing:
                    for stream in self._live:
                        stream.cancel_soon()
                live = dict(self._live)
            if live:
                self.runtime.drive()
            for stream, (loop, queue) in live.items():
                self._deliver(stream, loop, queue)
            if self._closing and not live:
                return

    def _deliver(self, stream: Stream, loop: asyncio.AbstractEventLoop, queue: _Queue) -> None:
        try:
            items: list[Piece | BaseException] = list(stream.poll())
        except Exception as error:
            items = [error]
        ended = any(isinstance(item, BaseException) or item.finish_reason is not None for item in items)
        if ended:
            with self._changed:
                self._live.pop(stream, None)
        try:
            for item in items:
                loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:  # the event loop is gone, and with it whoever waited
            with self._changed:
                self._live.pop(stream, None)
            stream.cancel_soon()
