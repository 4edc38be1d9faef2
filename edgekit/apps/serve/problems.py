"""Errors of a request, and their bodies in the form of each API."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from edgekit.errors import ContextExceeded, DoesNotFit, InvalidInput, RuntimeClosed, UnknownName, Unsupported

_TYPES = {401: "invalid_request_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error response: its status, and the fields of its body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)
        elif 400 <= status < 600:
            self.headers["x-should-retry"] = "false"

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that must be changed before it is sent again."""
    return ApiError(400, message, param=param, code=code)


def not_offered(what: str, param: str) -> ApiError:
    """Return the error for a field that would change the answer and is not supported."""
    return ApiError(400, f"{param}: {what}; leave it out", param=param, code="unsupported_parameter")


def api_error(error: BaseException) -> ApiError:
    """Return the error response for an exception. Unexpected exceptions reveal only their type."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return validation_problem(error)
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than it may; ask for fewer tokens", code="request_timeout")
    message = " ".join(str(error).split())
    if isinstance(error, ContextExceeded):
        return invalid(message, code="context_length_exceeded")
    if isinstance(error, UnknownName) and error.kind == "adapter":
        return ApiError(404, message, code="model_not_found", param="model")
    if isinstance(error, Unsupported):
        return invalid(message, code="unsupported")
    if isinstance(error, InvalidInput):
        name, colon, _ = message.partition(":")
        return invalid(message, param=name if colon and name.replace("_", "").isalnum() else None)
    if isinstance(error, DoesNotFit | RuntimeClosed):
        return ApiError(503, message, code="server_overloaded", retry_after_s=5)
    return ApiError(500, f"the server failed ({type(error).__name__}); its log has more")


def validation_problem(error: ValidationError) -> ApiError:
    """Return the first validation error: its field without pydantic's names of union members, and its reason."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    parts = (str(part) for part in first["loc"] if isinstance(part, int) or part.replace("_", "").isidentifier())
    param = ".".join(part for part, _ in groupby(parts))  # a form is named by its type and its field alike
    reasons = {"missing": "is missing", "extra_forbidden": "is unknown; leave it out"}
    reason = reasons.get(first["type"], first["msg"].replace("Input should", "must"))
    return invalid(f"{param or 'the body'}: {reason[:200]}", param[:200] or None)


def dialect_of(path: str) -> str:
    """Return the API that a path belongs to, which decides the form of its errors."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


def error_content(error: ApiError, dialect: str, request_id: str) -> dict[str, Any]:
    """Return the body of an error in the form of its API."""
    if dialect == "anthropic":
        kind = _ANTHROPIC.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
    if dialect == "ollama":
        return {"error": error.message}
    content = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": content}


def as_json(content: Any) -> bytes:
    """Encode JSON for a client: in UTF-8, compact, without NaN and infinities."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
