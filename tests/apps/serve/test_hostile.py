"""Generated hostile requests: none fails the server, and each refusal has the form of its API."""

from __future__ import annotations

from hostile_requests import attack
from serving import eventually, serving


def test_hostile_requests_are_refused_and_leave_nothing_behind() -> None:
    with serving(ollama=True) as served:
        statuses, complaints = attack(served.url, range(500))
        assert complaints == []
        assert statuses[200] > 20
        assert statuses[400] > 100
        eventually(lambda: served.service.admission.active == 0)
        assert served.runtime.metrics().running == 0
