"""Checks every request first: host name, web origin, API key and sizes. All paths are checked alike."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from edgekit.apps.serve.keys import Key
from edgekit.apps.serve.page import PATHS as PAGE
from edgekit.apps.serve.problems import ApiError, as_json, dialect_of, error_content
from edgekit.apps.serve.settings import LOOPBACK, ServerSettings
from edgekit.common.log import log
from edgekit.errors import quote_short

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from edgekit.apps.serve.service import Service

PUBLIC = frozenset({"/livez", "/readyz", "/health", "/v1/health"})
_READ_AWAY_S, _READ_AWAY_BYTES = 1.0, 64 << 20
_MAX_HEADERS, _MAX_HEADER_BYTES = 64, 16 << 10
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_PORT = re.compile(r":\d{1,5}$")
NOBODY = Key("", b"")


class Guard:
    """Wraps the application: request ids, checks, and one line of log for each request, without its content."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._hosts = allowed_hosts(service.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        began = perf_counter()
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, key=NOBODY, extra_headers={}, route="none")
        status = 499  # logged if the client disconnects before the response starts

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = {"x-request-id": request_id, "x-content-type-options": "nosniff", **state["extra_headers"]}
                message["headers"] = [*message.get("headers", ()), *_encoded(more), *self._cors(headers)]
            await send(message)

        try:
            try:
                self._check(scope, headers)
            except ApiError as error:
                if error.status == 413 and "expect" not in headers:
                    await read_away(receive)
                await problem(error, scope)(scope, receive, send_named)
                return
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await Response(status_code=204, headers=_PREFLIGHT)(scope, receive, send_named)
                return
            await self._app(scope, receive, send_named)
        finally:
            seconds = perf_counter() - began
            self._service.metrics.count_http(state["route"], scope["method"], status, seconds)
            log.info(
                "%s %s %s %d %.0f ms %s",
                request_id, scope["method"], quote_short(scope["path"]), status, 1000 * seconds, state["key"].name,
            )  # fmt: skip

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raise `ApiError` for the first violated rule; set the request's key."""
        sizes = [len(name) + len(value) for name, value in scope["headers"]]
        if len(sizes) > _MAX_HEADERS or sum(sizes) > _MAX_HEADER_BYTES:
            raise ApiError(431, "the headers are too large", code="headers_too_large")
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or _PORT.sub("", hosts[0].decode("latin-1")).lower() not in self._hosts:
            raise ApiError(403, "this host name may not be used; start with --allowed-host", code="host_not_allowed")
        origin = headers.get("origin")
        is_same = origin is not None and origin.partition("://")[2] == hosts[0].decode("latin-1")
        if origin is not None and not is_same and origin not in self._service.settings.allowed_origins:
            raise ApiError(403, "this origin may not call; start with --allowed-origin", code="origin_not_allowed")
        if origin is None and headers.get("sec-fetch-site") in ("cross-site", "same-site") and scope["path"] != "/":
            raise ApiError(403, "another site may not call", code="origin_not_allowed")
        is_preflight = scope["method"] == "OPTIONS" and origin is not None
        if not is_preflight and scope["path"] not in PUBLIC | PAGE:  # the page asks the user for the key
            scope["state"]["key"] = self._key(headers)
        if "transfer-encoding" in headers and "content-length" in headers:
            raise ApiError(400, "content-length and transfer-encoding exclude each other", headers=_CLOSE)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 12 or int(length) > self._service.max_body:
            raise too_large(self._service.max_body)

    def _key(self, headers: Mapping[str, str]) -> Key:
        keys = self._service.keys
        if not keys:
            return NOBODY
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = {
            each for each in (bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key")) if each
        }
        found = keys.find(given.pop()) if len(given) == 1 else None
        if found is None:
            raise ApiError(
                401, "no valid API key was sent", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )
        return found

    def _cors(self, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
        origin = headers.get("origin", "")
        if origin not in self._service.settings.allowed_origins:
            return []
        return _encoded({"access-control-allow-origin": origin, "vary": "Origin"})


_CLOSE = {"connection": "close"}
_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST",
    "access-control-allow-headers": "authorization, content-type, x-api-key, anthropic-version",
    "access-control-max-age": "600",
}


def allowed_hosts(settings: ServerSettings) -> frozenset[str]:
    """Return the allowed host names. This stops DNS rebinding: a page that rebinds its own name sends that name."""
    names = {*LOOPBACK, settings.host, *settings.allowed_hosts} - {"0.0.0.0", "::"}
    return frozenset(f"[{name}]" if ":" in name else name for name in {name.lower() for name in names})


def too_large(most: int) -> ApiError:
    """Return the error for a body of more than `most` bytes."""
    return ApiError(413, f"the body has more than {most:,} bytes", headers=_CLOSE)


async def read_away(receive: Receive) -> None:
    """Read the rest of a body, within limits. A client that still sends would see a broken connection and no error."""
    remaining = _READ_AWAY_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_READ_AWAY_S):
            while remaining > 0:
                message = await receive()
                remaining -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return


def problem(error: ApiError, scope: Scope) -> Response:
    """Return the response for an error, in the form of the path's API."""
    content = error_content(error, dialect_of(scope["path"]), scope["state"]["request_id"])
    return Response(as_json(content), error.status, error.headers, "application/json")


def _encoded(headers: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), str(value).encode("latin-1", "replace")) for name, value in headers.items()]
