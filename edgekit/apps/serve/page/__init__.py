"""`GET /`: a page to chat with the served models. It loads nothing from elsewhere and runs only its own scripts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_NAMES = {"/": "page.html"} | {
    f"/{name}": name for name in ("page.js", "answers.js", "chats.js", "markdown.js", "page.css")
}
PATHS = frozenset(_NAMES)


def _file(name: str) -> Callable[[object], Awaitable[Response]]:
    async def send(_: object) -> Response:
        data = (files("edgekit.apps.serve.page") / name).read_bytes()
        headers = {"content-security-policy": POLICY, "referrer-policy": "no-referrer", "cache-control": "no-cache"}
        return Response(data, headers=headers, media_type=f"{_TYPES[name[name.rindex('.') :]]}; charset=utf-8")

    return send


PAGE = tuple(("GET", path, _file(name)) for path, name in _NAMES.items())
