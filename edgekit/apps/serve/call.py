"""One request, from its body to the last byte of its response. It is cancelled when its client disconnects."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from edgekit.apps.serve.fields import ApiFields
from edgekit.apps.serve.guard import problem, read_away, too_large
from edgekit.apps.serve.keys import Key
from edgekit.apps.serve.overflow import redirect, route_for
from edgekit.apps.serve.problems import ApiError, api_error, as_json, invalid, validation_problem
from edgekit.common.footprint import return_unused
from edgekit.common.log import log
from edgekit.errors import quote_short

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from edgekit.apps.serve.models import ServedModel
    from edgekit.apps.serve.service import Service

Body = TypeVar("Body", bound=ApiFields)
Handler = Callable[["Call"], Awaitable["Response | EventStream"]]

PING_S = 10.0  # of silence; proxies close connections that are silent for 30 s or more
STALL_S = 30.0  # that a client may leave its answer unread, which holds a sequence of the engine
_BODY_S = 60.0
_OFF_THE_LOOP = 64 << 10  # larger bodies are parsed in a thread
_LARGE = 1 << 20


# Of a large body: what is made of them takes far more memory than their text, and the interpreter's lock.
_MOST_LISTS, _MOST_TEXTS, _MOST_VALUES = 32 << 10, 64 << 10, 512 << 10
_PLAIN = re.compile(r"[!-+\--~]{1,64}")  # what a header can hold: a space at an end of it is no valid header
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"')


class StalledClient(Exception):
    """The client does not read its response."""


class Call:
    """The request that a handler answers, and the resources that it holds until its end."""

    def __init__(self, service: Service, scope: Scope, receive: Receive) -> None:
        self.service, self.request = service, Request(scope, receive)
        self.stack = AsyncExitStack()  # resources to release at the end
        self.is_gone = False  # the client disconnected
        self.has_begun = False  # a part of the response was sent
        self.is_answered = False  # nothing more will be written
        self.deadline = asyncio.get_running_loop().time() + service.settings.timeout_s
        self._body: ApiFields | None = None
        self._is_large = False  # the body took memory that is given back at the end
        self._asked: ServedModel | None = None  # the model that the body names
        self._moved_to: str | None = None  # the smaller model that answers instead
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def key(self) -> Key:
        key: Key = self.request.state.key
        return key

    @property
    def id(self) -> str:
        """The id of this request, which is also in its log line."""
        request_id: str = self.request.state.request_id
        return request_id

    async def body(self, model: type[Body]) -> Body:
        """Read and check the body; from now on, a disconnect of the client cancels the call."""
        if isinstance(self._body, model):  # the handler runs again for another model
            return self._body
        body = await self._read(model)
        self._body = body
        return body

    async def _read(self, model: type[Body]) -> Body:
        kind = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_missing = not kind and self.request.url.path.startswith("/api/")  # Ollama's clients leave it out
        if kind != "application/json" and not is_missing:
            raise ApiError(415, "content-type must be application/json", code="unsupported_media_type")
        if self.request.headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "content-encoding is not supported; send plain JSON", code="unsupported_media_type")
        data = await self._bytes()
        self._watch()
        check_values(data)
        check_constants(data)
        try:
            if len(data) > _OFF_THE_LOOP:
                return self._known(await asyncio.to_thread(model.model_validate_json, data))
            return self._known(model.model_validate_json(data))
        except ValidationError as error:
            raise validation_problem(error) from None
        except RecursionError:
            raise invalid("the body is nested too deeply") from None

    async def model(self, name: str | None) -> ServedModel:
        """Return the model called `name`, opened if necessary. It stays open until this call ends."""
        service = self.service
        found = service.models.find(self._moved_to or name)
        self._asked = self._asked or found
        service.admission.check(found)
        await self.stack.enter_async_context(service.models.pool.using(found.model))
        return found

    @property
    def may_move(self) -> bool:
        """True if the smaller model can take over: the body has no token ids and names another, plain model."""
        asked, smaller = self._asked, self.service.settings.overflow_model
        if asked is None or asked.adapter is not None or self._body is None or self._body.names_tokens():
            return False
        return self._moved_to is None and asked.name != smaller and not self.has_begun

    async def move(self, reason: str) -> None:
        """Release everything, and let the smaller model answer. The response says so."""
        stack, self.stack = self.stack, AsyncExitStack()
        await stack.aclose()
        self._moved_to = self.service.settings.overflow_model
        headers = self.request.state.extra_headers
        headers.pop("x-edgekit-model", None)
        headers["x-edgekit-overflow"] = reason

    def ignore(self, header: str, names: list[str]) -> None:
        """Add ignored field names to a header of the response."""
        headers = self.request.state.extra_headers
        plain = [name for name in names if _PLAIN.fullmatch(name)]
        if plain:
            known = headers.get(header, "").split(",")[:32]
            headers[header] = ",".join(dict.fromkeys([*known, *plain[:32]])).lstrip(",")

    async def _bytes(self) -> bytes:
        most, data = self.service.max_body, bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in self.request.stream():
                    data += part
                    if len(data) > most:
                        data.clear()
                        await read_away(self.request.receive)
                        raise too_large(most)
        except TimeoutError:
            raise ApiError(
                408, "the body did not come in time", code="request_timeout", headers={"connection": "close"}
            ) from None
        except ClientDisconnect:
            self.is_gone = True
            raise asyncio.CancelledError from None
        self._is_large = len(data) > _LARGE
        return bytes(data)

    def _known(self, body: Body) -> Body:
        unknown = sorted(body.model_extra or {})
        if unknown and self.service.settings.strict:
            raise invalid(f"{quote_short(unknown[0])}: unknown field; leave it out", unknown[0], "unknown_parameter")
        self.ignore("x-edgekit-ignored", body.ignored())
        return body

    def _watch(self) -> None:
        async def watch() -> None:
            while (await self.request.receive())["type"] != "http.disconnect":
                pass
            if not self.is_answered and self._task is not None:
                self.is_gone = True
                self._task.cancel()

        self._watcher = asyncio.create_task(watch())

    async def close(self) -> None:
        """Release everything that the call holds."""
        self.is_answered = True
        if self._watcher is not None:
            self._watcher.cancel()
        await self.stack.aclose()
        if self._is_large:
            self._body = None
            await asyncio.to_thread(return_unused)


def check_values(data: bytes) -> None:
    """Refuse a large body of too many values before they are made. What stands in texts does not count."""
    if len(data) <= _OFF_THE_LOOP:
        return
    texts = (data.count(b'"') - data.count(b'\\"')) // 2
    if _is_over(data) and texts <= _MOST_TEXTS:
        data = _TEXT.sub(b"", data)
    if _is_over(data) or texts > _MOST_TEXTS:
        raise ApiError(
            413,
            f"the body has too many values: more than {_MOST_LISTS:,} objects and lists, {_MOST_TEXTS:,} "
            f"texts or {_MOST_VALUES:,} values; send fewer at a time",
        )


def check_constants(data: bytes) -> None:
    """Refuse NaN and Infinity, which are no JSON, though parsers take them."""
    if b"NaN" in data or b"Infinity" in data:
        with suppress(ValueError, RecursionError):  # what else is wrong is said by the body's fields
            json.loads(data, parse_constant=_refused)


def _refused(name: str) -> float:
    raise invalid(f"the body: {name} is no JSON")


def _is_over(data: bytes) -> bool:
    return data.count(b"{") + data.count(b"[") > _MOST_LISTS or data.count(b",") > _MOST_VALUES


class Endpoint:
    """A handler as an ASGI application, with a deadline and errors in the API's form. It ends by closing its call."""

    def __init__(self, service: Service, route: str, handler: Handler) -> None:
        self._service, self._route, self._handler = service, route, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["route"] = self._route
        call = Call(self._service, scope, receive)

        async def send_noting(message: object) -> None:
            call.has_begun = True
            await send(message)  # type: ignore[arg-type]

        try:
            while not await self._responded(call, scope, receive, send_noting):
                pass  # once more, with the smaller model
        except asyncio.CancelledError:
            if not call.is_gone:
                raise
            if call._task is not None:
                call._task.uncancel()
            self._service.metrics.disconnected += 1
        except Exception as error:
            found = api_error(error)
            if found.status >= 500 and found.status not in (501, 503, 504):
                log.error("%s failed: %s", call.id, type(error).__name__, exc_info=log.isEnabledFor(10))
            if not call.has_begun:
                await problem(found, scope)(scope, receive, send)
        finally:
            await call.close()

    async def _responded(self, call: Call, scope: Scope, receive: Receive, send: Send) -> bool:
        """Run the handler and send its response; False: it was refused, and the call moved to the smaller model."""
        try:
            async with asyncio.timeout_at(call.deadline):
                response = await self._handler(call)
            await response(scope, receive, send)
        except Exception as error:
            refused = api_error(error)
            policy = None if call.has_begun else self._service.settings.overflow_policy
            route = route_for(refused, policy, self._route, may_move=call.may_move)
            if route is None:
                raise
            self._service.metrics.overflows[route.where, str(route.reason)] += 1
            if route.where == "server":
                raise redirect(refused, route, self._route) from error
            await call.move(str(route.reason))
            return False
        return True


class EventStream:
    """A response that is sent while it is generated. It starts with the first event, so earlier errors have a status.

    `failed` formats a later error as an event; `ping` is sent when there was no event for a while.
    """

    def __init__(
        self,
        call: Call,
        events: AsyncIterator[bytes],
        failed: Callable[[ApiError], bytes],
        *,
        ping: bytes = b": ping\n\n",
        media_type: str = "text/event-stream; charset=utf-8",
    ) -> None:
        self._call, self._events, self._failed = call, events, failed
        self._ping, self._media_type = ping, media_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first: asyncio.Future[bytes] = asyncio.ensure_future(anext(self._events))
        try:
            done, _ = await asyncio.wait({first}, timeout=PING_S)
            if done:
                first.result()  # raise an error before anything is sent
        except BaseException:
            first.cancel()
            raise
        headers = [(b"content-type", self._media_type.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, (b"x-accel-buffering", b"no")]})
        loop = asyncio.get_running_loop()
        last_sent = loop.time()

        async def write(data: bytes) -> None:
            nonlocal last_sent
            try:
                async with asyncio.timeout(STALL_S):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except TimeoutError:
                raise StalledClient from None
            last_sent = loop.time()

        async def keep_alive() -> None:
            while True:
                await asyncio.sleep(max(0.01, last_sent + PING_S - loop.time()))
                if loop.time() - last_sent >= PING_S:
                    await write(self._ping)

        pinging = asyncio.create_task(keep_alive()) if self._ping else None
        try:
            try:
                async with asyncio.timeout_at(self._call.deadline):
                    await write(await first)
                    async for data in self._events:
                        await write(data)
            except StalledClient:
                raise
            except Exception as error:
                found = api_error(error)
                log.warning("%s failed in its stream: %s", self._call.id, type(error).__name__)
                self._call.service.metrics.failed_streams += 1
                await write(self._failed(found))
            self._call.is_answered = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            first.cancel()
            if pinging is not None:
                pinging.cancel()


def json_response(content: object) -> Response:
    """Return a JSON response."""
    return Response(as_json(content), media_type="application/json")


def event(content: object, name: str | None = None) -> bytes:
    """Return a server-sent event: one line of data, after a line with its name if there is one."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + as_json(content) + b"\n\n"
