"""Hostile requests are refused in the form of their API; bodies of megabytes by their size or number of values."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from hostile_requests import attack
from serving import eventually, serving

from edgekit.apps.serve.call import check_values
from edgekit.apps.serve.problems import ApiError


def test_hostile_requests_are_refused_and_leave_nothing_behind() -> None:
    with serving(ollama=True) as served:
        statuses, complaints = attack(served.url, range(500))
        assert complaints == []
        assert statuses[200] > 20
        assert statuses[400] > 100
        eventually(lambda: served.service.admission.active == 0)
        assert served.runtime.metrics().running == 0


def test_a_body_above_the_limit_gets_its_answer_and_not_a_broken_connection() -> None:
    with serving() as served:
        address = urlsplit(served.url)
        body = b'{"prompt": "' + b"a" * 9_000_000 + b'"}'
        for framing in (f"content-length: {len(body)}", "transfer-encoding: chunked"):
            with socket.create_connection((address.hostname, address.port or 0), timeout=30) as connection:
                head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n{framing}\r\n"
                connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode())
                sent = body if "length" in framing else f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
                connection.sendall(sent)  # all of it, as urllib does, before anything is read
                assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


MANY: dict[str, Any] = {
    "lists": [[1]] * 40_000,
    "objects": [{}] * 40_000,
    "numbers": [1] * 600_000,
    "texts": ["a"] * 70_000,
    "names": {f"a{place}": 1 for place in range(70_000)},
}


@pytest.mark.parametrize("kind", MANY)
def test_too_many_values_are_refused_before_they_are_made(kind: str) -> None:
    with pytest.raises(ApiError, match="send fewer at a time") as caught:
        check_values(json.dumps({"prompt": MANY[kind]}).encode())
    assert caught.value.status == 413


@pytest.mark.parametrize(
    "value",
    [
        "[{,}]" * 200_000,
        '"\\ ' * 200_000,
        ["[,{" * 20 for _ in range(30_000)],
        [1] * 400_000,
        [{"role": "user", "content": "a, [b]"}] * 8_000,
    ],
    ids=["a text of brackets", "a text of quotes", "texts of brackets", "tokens", "messages"],
)
def test_what_stands_in_texts_does_not_count(value: Any) -> None:
    check_values(json.dumps({"prompt": value}).encode())
