"""A client that disconnects in any phase of its request: the running engine call is the last one for it.

Counted in engine calls, which the test lets through one by one.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from runtimes import codec, make_runtime
from serving import Served, eventually, serving

from edgekit.testing import FakeEngine

CHUNK = 16


class GatedEngine(FakeEngine):
    """Each call waits until the test lets it through."""

    def __init__(self) -> None:
        super().__init__(vocabulary=codec().vocabulary, max_states=8)
        self.fed: list[list[int]] = []  # the tokens of each chunk
        self._entered, self._gate = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, chunks: Sequence[Any]) -> Any:
        self.fed += [list(chunk.tokens) for chunk in chunks]
        self._entered.release()
        assert self._gate.acquire(timeout=60)
        return super().forward(chunks)

    def let_through(self, calls: int) -> None:
        """Return when the call after `calls` more has begun, and waits."""
        for _ in range(calls):
            self._gate.release()
            assert self._entered.acquire(timeout=20)

    def begun(self) -> None:
        """Wait for the first call."""
        assert self._entered.acquire(timeout=20)

    def open_gate(self) -> None:
        """Let everything through from now on."""
        for _ in range(10_000):
            self._gate.release()


@contextmanager
def gated(sequences: int) -> Iterator[tuple[Served, GatedEngine]]:
    engine = GatedEngine()
    with serving({"gated": make_runtime(engine, chunk_tokens=CHUNK, sequences=sequences)}) as served:
        try:
            yield served, engine
        finally:
            engine.open_gate()


def post(served: Served, text: str, *, stream: bool) -> socket.socket:
    """Return the connection of a client that sent a request and reads nothing."""
    host, port = served.url.removeprefix("http://").rsplit(":", 1)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 60, "stream": stream}
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def is_free(served: Served) -> bool:
    metrics = served.runtime.metrics()
    return metrics.running == metrics.waiting == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("calls", [0, 3, 12, 20], ids=["first chunk", "prefill", "first tokens", "decode"])
def test_the_running_engine_call_is_the_last_one(calls: int, stream: bool) -> None:
    with gated(sequences=1) as (served, engine):
        connection = post(served, "the cat " * 40, stream=stream)  # about ten chunks
        engine.begun()
        engine.let_through(calls)
        before = len(engine.fed)
        assert before == calls + 1
        connection.close()
        eventually(lambda: served.service.admission.active == 0)
        engine.open_gate()
        eventually(lambda: is_free(served))
        assert len(engine.fed) == before
        assert served.service.metrics.disconnected == 1
        assert served.runtime.metrics().finished == {"cancelled": 1}
        answer = httpx.post(
            f"{served.v1}/chat/completions",
            json={"messages": [{"role": "user", "content": "the"}], "max_tokens": 2},
            timeout=60,
        )
        assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_queued_request_never_runs(stream: bool) -> None:
    mark = codec().encode("🙂", add_special_tokens=False)[0]
    with gated(sequences=1) as (served, engine):
        first = post(served, "the cat", stream=stream)
        engine.begun()
        second = post(served, "🙂", stream=stream)
        eventually(lambda: served.runtime.metrics().waiting == 1)
        second.close()
        eventually(lambda: served.service.admission.active == 1)
        engine.open_gate()
        first.settimeout(20)
        received = b""
        while b"[DONE]" not in received and b'"usage"' not in received:
            received += first.recv(65536)
        eventually(lambda: is_free(served))
        first.close()
        assert not any(mark in tokens for tokens in engine.fed if len(tokens) > 1)  # answers may hold it
        assert served.runtime.metrics().finished == {"length": 1, "cancelled": 1}
