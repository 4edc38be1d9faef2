"""Routing policy: answer a request here, on a smaller artifact, or on a server of the app. The app sends it.

    policy = RoutePolicy(server="https://llm.example.org/v1", max_waiting=4, min_confidence=0.6)
    route = policy.before(prompt_tokens=900, max_tokens=200, room_tokens=2048, waiting=runtime.metrics().waiting)
    if route.where == "server":
        post(route.url, json={"model": "my-model", "messages": messages})

Nothing here opens a connection. Without a policy every request is answered here; with one, each decision has a reason
and is logged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from edgekit.common.base import Frozen
from edgekit.common.log import log

Place = Literal["here", "smaller", "server"]
OverflowReason = Literal["does not fit", "queue too long", "too slow", "low confidence"]
_A_SMALLER_MODEL_HELPS = frozenset({"queue too long", "too slow"})


def _checked(server: str) -> str:
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or not server.isprintable():
        raise ValueError(f"{server!r} is not an http or https URL; give one such as https://llm.example.org/v1")
    return server.rstrip("/")


ServerUrl = Annotated[str, AfterValidator(_checked)]  # of an OpenAI-compatible server, without a slash at its end


class Route(Frozen):
    """The chosen destination, and the reason; None if the request stays here."""

    where: Place
    reason: OverflowReason | None = None
    detail: str = ""  # with the numbers
    url: str | None = None  # address of the server's chat completions


class RoutePolicy(Frozen):
    """The limits beyond which a request leaves this device, and the destinations that can take it.

    A request that does not fit, and an answer with low confidence, go to the server. A request that would wait too long
    or be slow goes to the smaller artifact if one is open, else to the server. A limit of None is off.
    """

    server: ServerUrl | None = None  # it ends in /v1
    has_smaller: bool = False  # a smaller artifact is open too
    max_waiting: Annotated[int, Field(ge=0)] | None = None  # requests before this one
    min_tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    min_confidence: Annotated[float, Field(gt=0, lt=1)] | None = None  # mean probability of the tokens of an answer

    def before(
        self,
        *,
        prompt_tokens: int,
        max_tokens: int,
        room_tokens: int,
        waiting: int = 0,
        tokens_per_second: float | None = None,
    ) -> Route:
        """Decide before a request is answered. `room_tokens`: the context here; `waiting`: requests in the queue."""
        if prompt_tokens + max_tokens > room_tokens:
            detail = f"{prompt_tokens} + {max_tokens} tokens, and there is room for {room_tokens}"
            return self.leave("does not fit", detail)
        if self.max_waiting is not None and waiting > self.max_waiting:
            return self.leave("queue too long", f"{waiting} are waiting, allowed {self.max_waiting}")
        least = self.min_tokens_per_second
        if least is not None and tokens_per_second is not None and tokens_per_second < least:
            return self.leave("too slow", f"{tokens_per_second:.3g} tok/s, at least {least:g}")
        return Route(where="here")

    def after(self, log_probabilities: Sequence[float]) -> Route:
        """Decide by the log probabilities of an answer's tokens whether to keep the answer, or ask the server."""
        if self.min_confidence is None or not log_probabilities:
            return Route(where="here")
        confidence = math.exp(math.fsum(log_probabilities) / len(log_probabilities))
        if confidence >= self.min_confidence:
            return Route(where="here")
        detail = f"mean probability {confidence:.3f}, at least {self.min_confidence:g}"
        return self.leave("low confidence", detail)

    def leave(self, reason: OverflowReason, detail: str) -> Route:
        """Decide where a request goes that cannot, or should not, be answered here. `detail`: the numbers."""
        if self.has_smaller and reason in _A_SMALLER_MODEL_HELPS:
            route = Route(where="smaller", reason=reason, detail=detail)
        elif self.server is not None:
            route = Route(where="server", reason=reason, detail=detail, url=f"{self.server}/chat/completions")
        else:
            route = Route(where="here", reason=reason, detail=f"{detail}; no other place was given")
        log.info("route: %s, %s: %s", route.where, reason, route.detail)
        return route
