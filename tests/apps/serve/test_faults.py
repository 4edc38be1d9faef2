"""Full queues, clients that leave or stall, and failing engines: the others go on, and nothing is left behind."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from runtimes import codec, make_runtime
from serving import Served, SlowEngine, eventually, serving

from edgekit.apps.serve.server import DeadlineProtocol, _NoFlood, allowed_connections
from edgekit.errors import TargetFailed
from edgekit.testing import FakeEngine

LONG: dict[str, Any] = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 400}


def chat_url(served: Served) -> str:
    return f"{served.v1}/chat/completions"


def post(served: Served, **change: Any) -> httpx.Response:
    return httpx.post(chat_url(served), json={**LONG, **change}, timeout=60)


def is_idle(served: Served) -> bool:
    metrics = served.runtime.metrics()
    return served.service.admission.active == 0 and metrics.running == 0 and metrics.waiting == 0


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_ends_when_its_client_leaves(stream: bool) -> None:
    with serving({"slow": make_runtime(SlowEngine(0.02))}) as served:
        post(served, max_tokens=1)  # the template's process has started
        body = {**LONG, "stream": stream}
        with suppress(httpx.ReadTimeout), httpx.stream("POST", chat_url(served), json=body, timeout=2) as response:
            next(response.iter_bytes())
        eventually(lambda: is_idle(served), 5)
        eventually(lambda: served.service.metrics.disconnected == 1)
        assert served.runtime.metrics().finished == {"length": 1, "cancelled": 1}
        assert post(served, max_tokens=2).status_code == 200


def test_full_queue_refuses_at_once_with_a_retry_time() -> None:
    with serving({"slow": make_runtime(SlowEngine(0.02), sequences=1)}, max_queued=1) as served:
        threads = [threading.Thread(target=post, args=(served,), kwargs={"max_tokens": 60}) for _ in range(2)]
        for thread in threads:
            thread.start()
        eventually(lambda: served.service.admission.active == 2)
        refused = post(served)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert httpx.get(f"{served.url}/readyz").status_code == 503
        assert httpx.get(f"{served.url}/livez").status_code == 200
        for thread in threads:
            thread.join()
        assert httpx.get(f"{served.url}/readyz").status_code == 200
        assert served.service.admission.rejected == {"requests": 1}


def test_waiting_prompt_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit.apps.serve.admission.MAX_QUEUED_TOKENS", 30)
    long = [{"role": "user", "content": "the cat " * 20}]
    with gated(sequences=1) as (served, engine):
        first = post_of_leaving(served, "the cat", stream=False)
        engine.begun()
        refused = post(served, messages=long, max_tokens=1)
        assert (refused.status_code, served.service.admission.rejected) == (503, {"tokens": 1})
        engine.open_gate()
        first.close()
        eventually(lambda: is_idle(served))
        assert post(served, messages=long, max_tokens=1).status_code == 200  # alone it is never refused


def test_one_key_cannot_take_everything(tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("alice alice-has-a-long-key\nbob bob-has-a-long-key-too\n")
    with serving({"slow": make_runtime(SlowEngine(0.02))}, api_key_file=file, max_per_key=1) as served:
        alice, bob = {"x-api-key": "alice-has-a-long-key"}, {"x-api-key": "bob-has-a-long-key-too"}
        url = chat_url(served)
        thread = threading.Thread(
            target=lambda: httpx.post(url, json={**LONG, "max_tokens": 80}, headers=alice, timeout=60)
        )
        thread.start()
        eventually(lambda: served.service.admission.active == 1)
        refused = httpx.post(url, json=LONG, headers=alice)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert httpx.post(url, json={**LONG, "max_tokens": 1}, headers=bob, timeout=60).status_code == 200
        thread.join()


class FailingEngine(FakeEngine):
    """Fails at a token that only one of its requests has."""

    def forward(self, chunks: Sequence[Any]) -> Any:
        if any(self.bad in chunk.tokens for chunk in chunks):
            for chunk in chunks:
                chunk.state.close()
            raise TargetFailed("the engine failed at /a/secret/path")
        return super().forward(chunks)

    bad = -1


def test_a_failing_request_is_an_error_and_the_others_go_on() -> None:
    engine = FailingEngine(vocabulary=codec().vocabulary, max_states=8)
    engine.bad = codec().encode("🙂", add_special_tokens=False)[0]
    with serving({"tiny": make_runtime(engine)}) as served:
        failed = post(served, messages=[{"role": "user", "content": "🙂"}])
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
        assert failed.headers["x-should-retry"] == "false"
        assert "secret" not in failed.text


def test_an_error_in_a_stream_is_its_last_event() -> None:
    engine = FailingEngine(vocabulary=codec().vocabulary, max_states=8)
    with serving({"tiny": make_runtime(engine)}) as served:
        answer = served.runtime.chat(LONG["messages"], max_tokens=30)
        engine.bad = answer.tokens[10]
        body = {**LONG, "stream": True, "temperature": 0}
        text = httpx.post(chat_url(served), json=body).text
        last = text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert "[DONE]" not in text
        engine.bad = -1
        assert post(served, max_tokens=2).status_code == 200


def test_a_client_that_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit.apps.serve.call.STALL_S", 0.5)
    with serving({"slow": make_runtime(SlowEngine(0.0), context=4096)}) as served:
        host, port = served.url.removeprefix("http://").rsplit(":", 1)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((host, int(port)))
        more = {"stream": True, "max_tokens": 4000, "n": 4, "logprobs": True, "top_logprobs": 20}
        body = json.dumps({**LONG, **more}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        eventually(lambda: served.service.admission.active == 1 or served.service.admission.active == 4)
        eventually(lambda: is_idle(served), 60)
        connection.close()


def test_idle_stream_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit.apps.serve.call.PING_S", 0.05)
    with serving({"slow": make_runtime(SlowEngine(0.15), chunk_tokens=4)}) as served:
        text = post(served, stream=True, max_tokens=3).text
        assert ": ping\n\n" in text
        assert text.endswith("data: [DONE]\n\n")


def test_a_deadline_ends_a_request() -> None:
    with serving({"slow": make_runtime(SlowEngine(0.05))}, timeout_s=0.5) as served:
        late = post(served)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "request_timeout")
        assert "request_timeout" in post(served, stream=True).text
        eventually(lambda: is_idle(served), 5)


def test_draining_refuses_new_work_and_finishes_what_runs() -> None:
    with serving({"slow": make_runtime(SlowEngine(0.02))}, drain_s=20) as served:
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(post(served, max_tokens=60)))
        thread.start()
        eventually(lambda: served.service.admission.active == 1)
        served.service.admission.is_draining = True
        refused = post(served)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert httpx.get(f"{served.url}/readyz").status_code == 503
        thread.join()
        assert answers[0].json()["usage"]["completion_tokens"] == 60


def test_idle_connections_give_way_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeadlineProtocol, "most_connections", 8)
    with serving({"slow": make_runtime(SlowEngine(0.01))}) as served:
        address = (served.server.config.host, int(served.url.rpartition(":")[2]))
        with httpx.stream(
            "POST", chat_url(served), json={**LONG, "stream": True, "max_tokens": 60}, timeout=60
        ) as busy:
            silent = [socket.create_connection(address) for _ in range(30)]
            eventually(lambda: len(served.server.server_state.connections) <= 8)
            assert post(served, max_tokens=1).status_code == 200
            assert (
                sum(1 for line in busy.iter_lines() if line.startswith("data:")) > 3
            )  # a running answer is not cut off
        silent[0].settimeout(10)
        assert silent[0].recv(1) == b""  # the oldest was closed
        for each in silent:
            each.close()


def test_a_second_request_has_the_time_of_a_first_for_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit.apps.serve.server.HEADERS_S", 0.3)
    engines = {"slow": make_runtime(SlowEngine(0.01))}
    with serving(engines) as served, post_of_leaving(served, "the cat", stream=False) as connection:
        connection.sendall(b"GET /li")
        connection.settimeout(3)  # an idle connection has more
        while connection.recv(65536):
            pass


def test_a_lack_of_files_is_told_once_in_one_line() -> None:
    quiet, told = _NoFlood(), "socket.accept() out of system resource"
    records = [logging.LogRecord("asyncio", 40, "", 0, told, None, (OSError, OSError(), None)) for _ in range(2)]
    assert [quiet.filter(record) for record in records] == [True, False]
    assert "ulimit -n" in records[0].getMessage() and records[0].exc_info is None


def test_the_system_is_asked_for_more_files() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        assert 8 <= allowed_connections() <= 1024
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(4096, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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


def post_of_leaving(served: Served, text: str, *, stream: bool) -> socket.socket:
    """Return the connection of a client that sent a request and reads nothing."""
    host, port = served.url.removeprefix("http://").rsplit(":", 1)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 60, "stream": stream}
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("calls", [0, 3, 12, 20], ids=["first chunk", "prefill", "first tokens", "decode"])
def test_the_running_engine_call_is_the_last_one(calls: int, stream: bool) -> None:
    with gated(sequences=1) as (served, engine):
        connection = post_of_leaving(served, "the cat " * 40, stream=stream)  # about ten chunks
        engine.begun()
        engine.let_through(calls)
        before = len(engine.fed)
        assert before == calls + 1
        connection.close()
        eventually(lambda: served.service.admission.active == 0)
        engine.open_gate()
        eventually(lambda: is_idle(served))
        assert len(engine.fed) == before
        assert served.service.metrics.disconnected == 1
        assert served.runtime.metrics().finished == {"cancelled": 1}
        assert post(served, max_tokens=2).json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_queued_request_never_runs(stream: bool) -> None:
    mark = codec().encode("🙂", add_special_tokens=False)[0]
    with gated(sequences=1) as (served, engine):
        first = post_of_leaving(served, "the cat", stream=stream)
        engine.begun()
        second = post_of_leaving(served, "🙂", stream=stream)
        eventually(lambda: served.runtime.metrics().waiting == 1)
        second.close()
        eventually(lambda: served.service.admission.active == 1)
        engine.open_gate()
        first.settimeout(20)
        received = b""
        while b"[DONE]" not in received and b'"usage"' not in received:
            received += first.recv(65536)
        eventually(lambda: is_idle(served))
        first.close()
        assert not any(mark in tokens for tokens in engine.fed if len(tokens) > 1)  # answers may hold it
        assert served.runtime.metrics().finished == {"length": 1, "cancelled": 1}
