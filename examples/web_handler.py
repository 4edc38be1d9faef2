"""An HTTP endpoint that streams answers and stops as soon as the client disconnects. Plain ASGI, no framework.

    ARTIFACT=my.edgekit uvicorn examples.web_handler:app      # or hypercorn, granian, ...
    curl -N -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}' localhost:8000/chat

It answers `POST /chat` with server-sent events: one `data:` line of JSON for each piece. Put authentication and rate
limits in front of it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import edgekit
from edgekit.errors import EdgekitError, InvalidInput

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

MAX_BODY_BYTES = 64 * 1024
ALLOWED = {"max_tokens", "temperature", "top_p", "seed", "stop"}


class ChatApp:
    """The ASGI application. The model is opened when the server starts and closed when it stops."""

    def __init__(self, artifact: str) -> None:
        self._artifact = artifact
        self.runtime: edgekit.AsyncRuntime | None = None

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._chat(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            event = await receive()
            if event["type"] == "lifespan.startup":
                self.runtime = await edgekit.AsyncRuntime.open(self._artifact, sequences=4)
                await send({"type": "lifespan.startup.complete"})
            elif event["type"] == "lifespan.shutdown":
                if self.runtime is not None:
                    await self.runtime.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _chat(self, scope: Event, receive: Receive, send: Send) -> None:
        if (scope["method"], scope["path"]) != ("POST", "/chat"):
            await send_json(send, 404, {"error": "POST /chat is the only resource"})
            return
        assert self.runtime is not None, "the server did not send lifespan.startup"
        try:
            messages, options = parse_request(await read_body(receive))
            # A bad request is refused here, before the first byte of the response.
            async with await self.runtime.submit(messages, **options) as stream:
                await self._stream(stream, receive, send)
        except InvalidInput as error:
            await send_json(send, 400, {"error": str(error)})
        except EdgekitError as error:
            await send_json(send, 503, {"error": str(error)})

    async def _stream(self, stream: edgekit.AsyncStream, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def write() -> None:
            try:
                async for piece in stream:
                    await send_piece(send, piece)
            except EdgekitError as error:
                await send({"type": "http.response.body", "body": event_line({"error": str(error)}), "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        writing = asyncio.create_task(write())
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, leaving):
                task.cancel()  # leaving the stream's block then cancels the request in the engine
            await asyncio.gather(writing, leaving, return_exceptions=True)


async def read_body(receive: Receive) -> bytes:
    """Return the body of a request. Raises InvalidInput where it is too long."""
    body: bytes = b""
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise InvalidInput("the client left before the request was complete")
        body += bytes(event.get("body", b""))
        if len(body) > MAX_BODY_BYTES:
            raise InvalidInput(f"the body has more than {MAX_BODY_BYTES:,} bytes")
        if not event.get("more_body"):
            return body


def parse_request(body: bytes) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """Return messages and options. Only listed options pass: a client must not choose adapters or tenants."""
    try:
        request = json.loads(body)
        messages = [{"role": str(each["role"]), "content": str(each["content"])} for each in request.pop("messages")]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidInput("the body must be a JSON object with `messages`, each with role and content") from error
    unknown = set(request) - ALLOWED
    if unknown:
        raise InvalidInput(f"unknown option {sorted(unknown)[0]!r}; known: {', '.join(sorted(ALLOWED))}")
    return messages, {"max_tokens": 256, **request}


async def disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_piece(send: Send, piece: edgekit.Piece) -> None:
    content = {"text": piece.text, "finish_reason": piece.finish_reason}
    await send({"type": "http.response.body", "body": event_line(content), "more_body": True})


async def send_json(send: Send, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


def event_line(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


app = ChatApp(os.environ.get("ARTIFACT", "my.edgekit"))
