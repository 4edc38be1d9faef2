"""Moves a request that cannot be answered now to a smaller served model, or redirects its client to another server.

This server itself opens no connection. A redirect with status 307 keeps method and body. Clients rightly drop their
key when they are sent to another host.
"""

from __future__ import annotations

from edgekit.apps.serve.problems import ApiError
from edgekit.route import OverflowReason, Route, RoutePolicy

_REASONS: dict[str | None, OverflowReason] = {
    "context_length_exceeded": "does not fit",
    "server_overloaded": "queue too long",
}
_REDIRECTED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # an OpenAI-compatible server has them too
_CONVERSATIONS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")


def route_for(error: ApiError, policy: RoutePolicy | None, path: str, *, may_move: bool) -> Route | None:
    """Return the server or smaller model for a request that failed with `error`; None: the client gets the error.

    `may_move`: the smaller model could take over the request. Only conversations go there, because texts of
    `/v1/completions` may be meant for one tokenizer.
    """
    reason = _REASONS.get(error.code)
    if reason is None or policy is None:
        return None
    if policy.has_smaller and not (path in _CONVERSATIONS and may_move):
        policy = policy.model_copy(update={"has_smaller": False})
    if path not in _REDIRECTED:
        policy = policy.model_copy(update={"server": None})
    route = policy.leave(reason, error.message)
    return None if route.where == "here" else route


def redirect(error: ApiError, route: Route, path: str) -> ApiError:
    """Return the redirect to the server of a route."""
    assert route.url is not None and route.reason is not None
    location = route.url.removesuffix("/chat/completions") + path.removeprefix("/v1")
    headers = {"location": location, "x-edgekit-overflow": route.reason}
    return ApiError(307, error.message, code=error.code, headers=headers)
