"""Moves a request that cannot be answered now to a smaller served model, or redirects its client to another server.

This server itself opens no connection. A redirect with status 307 keeps method and body. Clients rightly drop their
key when they are sent to another host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.route import OverflowReason, Route
from edgekit.serve.problems import ApiError

if TYPE_CHECKING:
    from edgekit.serve.call import Call

_REASONS: dict[str | None, OverflowReason] = {
    "context_length_exceeded": "does not fit",
    "server_overloaded": "queue too long",
}
_REDIRECTED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # an OpenAI-compatible server has them too
_CONVERSATIONS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")


def route_for(error: ApiError, call: Call, path: str) -> Route | None:
    """Return the other place for a request that failed with `error`; None: there is none, the client gets the error.

    Only conversations go to a smaller model. Texts of `/v1/completions` and token ids may belong to one tokenizer.
    """
    reason, policy = _REASONS.get(error.code), call.service.settings.overflow_policy
    if reason is None or policy is None:
        return None
    if policy.has_smaller and not (path in _CONVERSATIONS and call.may_move):
        policy = policy.model_copy(update={"has_smaller": False})
    if path not in _REDIRECTED:
        policy = policy.model_copy(update={"server": None})
    if not policy.has_smaller and policy.server is None:
        return None
    route = policy.leave(reason, error.message)
    if route.where == "here":
        return None
    call.service.metrics.overflows[route.where, reason] += 1
    return route


def redirect(error: ApiError, route: Route, path: str) -> ApiError:
    """Return the redirect to the server of a route."""
    assert route.url is not None and route.reason is not None
    location = route.url.removesuffix("/chat/completions") + path.removeprefix("/v1")
    headers = {"location": location, "x-edgekit-overflow": route.reason}
    return ApiError(307, error.message, code=error.code, headers=headers)
