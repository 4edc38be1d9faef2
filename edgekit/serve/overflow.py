"""Sends a client on to another server, where this one cannot answer; this server itself calls nobody.

A redirect of status 307 keeps method and body. Clients drop their key on the way to another host, as they should.
"""

from __future__ import annotations

from edgekit.common.log import log
from edgekit.route import OverflowReason, RoutePolicy
from edgekit.serve.problems import ApiError

_REASONS: dict[str | None, OverflowReason] = {
    "context_length_exceeded": "does not fit",
    "server_overloaded": "queue too long",
}
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")  # of servers that OpenAI's clients call


def sent_on(error: ApiError, policy: RoutePolicy | None, path: str) -> ApiError:
    """Return a redirect in place of an error that another server could answer; else the error."""
    reason = _REASONS.get(error.code)
    if policy is None or policy.server is None or reason is None or path not in _PATHS:
        return error
    log.info("overflow: %s: %s", reason, error.message)
    headers = {"location": policy.server + path.removeprefix("/v1"), "x-edgekit-overflow": reason}
    return ApiError(307, error.message, code=error.code, headers=headers)
