"""Redirects clients to another server if this one cannot answer. This server itself opens no connection.

A redirect with status 307 keeps method and body. Clients rightly drop their key when they are sent to another host.
"""

from __future__ import annotations

from edgekit.common.log import log
from edgekit.route import OverflowReason, RoutePolicy
from edgekit.serve.problems import ApiError

_REASONS: dict[str | None, OverflowReason] = {
    "context_length_exceeded": "does not fit",
    "server_overloaded": "queue too long",
}
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # paths that an OpenAI-compatible server has too


def sent_on(error: ApiError, policy: RoutePolicy | None, path: str) -> ApiError:
    """Return a redirect for an error that another server could answer, otherwise the error itself."""
    reason = _REASONS.get(error.code)
    if policy is None or policy.server is None or reason is None or path not in _PATHS:
        return error
    log.info("overflow: %s: %s", reason, error.message)
    headers = {"location": policy.server + path.removeprefix("/v1"), "x-edgekit-overflow": reason}
    return ApiError(307, error.message, code=error.code, headers=headers)
