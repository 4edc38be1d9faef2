"""`GET /`: a page to chat with the served models. It loads nothing from elsewhere and runs only its own script."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from edgekit.apps.serve.call import Call

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}


def _file(name: str, media_type: str) -> Callable[[Call], Awaitable[Response]]:
    async def send(call: Call) -> Response:
        data = (files("edgekit.apps.serve") / name).read_bytes()
        headers = {"content-security-policy": POLICY, "referrer-policy": "no-referrer", "cache-control": "no-cache"}
        return Response(data, headers=headers, media_type=media_type)

    return send


PAGE = tuple(("GET", path, _file(*file)) for path, file in _FILES.items())
