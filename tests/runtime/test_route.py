"""The policy of overflow: a reason for each decision, and no place that the app did not name."""

from __future__ import annotations

import logging
import math

import pytest
from pydantic import ValidationError

from edgekit.route import RoutePolicy

SERVER = "https://llm.example.org/v1"
FITS = {"prompt_tokens": 100, "max_tokens": 100, "room_tokens": 512}


def test_without_limits_only_requests_that_do_not_fit_leave() -> None:
    policy = RoutePolicy(server=SERVER)
    assert policy.before(**FITS, waiting=1000, tokens_per_second=0.01).where == "here"
    assert policy.after([-9.0]).where == "here"
    route = policy.before(prompt_tokens=500, max_tokens=100, room_tokens=512)
    assert (route.where, route.reason, route.url) == ("server", "does not fit", f"{SERVER}/chat/completions")
    assert route.detail == "500 + 100 tokens, and there is room for 512"


@pytest.mark.parametrize(
    ("state", "reason"),
    [({"waiting": 5}, "queue too long"), ({"tokens_per_second": 3.0}, "too slow")],
)
def test_waiting_and_slow_requests_go_to_the_smaller_artifact_first(state: dict[str, float], reason: str) -> None:
    limits = {"max_waiting": 4, "min_tokens_per_second": 5.0}
    for has_smaller, where in ((True, "smaller"), (False, "server")):
        route = RoutePolicy(server=SERVER, has_smaller=has_smaller, **limits).before(**FITS, **state)  # type: ignore[arg-type]
        assert (route.where, route.reason) == (where, reason)
    enough = RoutePolicy(server=SERVER, **limits).before(**FITS, waiting=4, tokens_per_second=5.0)  # type: ignore[arg-type]
    assert enough.where == "here" and enough.reason is None


def test_low_confidence_answer_goes_to_the_server_not_a_smaller_model() -> None:
    policy = RoutePolicy(server=SERVER, has_smaller=True, min_confidence=0.5)
    assert policy.after([math.log(0.9), math.log(0.6)]).where == "here"
    route = policy.after([math.log(0.2), math.log(0.3)])
    assert (route.where, route.reason) == ("server", "low confidence") and "0.245" in route.detail


def test_request_stays_without_another_place_and_reasons_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="edgekit"):
        route = RoutePolicy(max_waiting=0).before(**FITS, waiting=1)
    assert (route.where, route.reason, route.url) == ("here", "queue too long", None)
    assert "no other place was given" in caplog.text


@pytest.mark.parametrize("server", ["llm.example.org", "file:///etc/passwd", "https://me:secret@host/v1", ""])
def test_a_server_is_a_url_without_secrets(server: str) -> None:
    with pytest.raises(ValidationError, match="not an http or https URL"):
        RoutePolicy(server=server)
