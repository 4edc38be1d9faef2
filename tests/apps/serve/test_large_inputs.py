"""Hostile requests are refused in the form of their API; bodies of megabytes by their size or number of values."""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hostile_requests import attack
from runtimes import make_runtime
from serving import Served, eventually, serving

from edgekit.apps.serve import service
from edgekit.apps.serve.call import check_values
from edgekit.apps.serve.problems import ApiError
from edgekit.runtime.memory.budget import MemoryBudget


@pytest.mark.parametrize("count", [200, pytest.param(5_000, marks=pytest.mark.long)])
def test_hostile_requests_are_refused_and_leave_nothing_behind(count: int) -> None:
    with serving(ollama=True) as served:
        statuses, complaints = attack(served.url, range(count))
        assert complaints == []
        assert statuses[200] > count // 25
        assert statuses[400] > count // 5
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


MOST_MB, MOST_REFUSAL_S, MOST_STALL_S = 64.0, 1.0, 0.5
SIZE = 8_000_000


def large_inputs() -> Iterator[tuple[str, str, bytes]]:
    """Yield a name, a path and a body for each way to send much."""
    prompts = {
        "short words": '"' + "a " * (SIZE // 2) + '"',
        "one word": '"' + "a" * SIZE + '"',
        "blanks": '"' + " " * SIZE + '"',
        "escapes": '"' + "\\u00e9" * (SIZE // 6) + '"',
        "numbers": "[" + "1," * (SIZE // 2) + "1]",
        "lists": "[" + "[1]," * (SIZE // 4) + "[1]]",
        "texts": "[" + '"ab",' * (SIZE // 5) + '"a"]',
    }
    user = '{{"role": "user", "content": {}}}'
    parts = "[" + '{"type": "text"},' * (SIZE // 17) + '{"type": "text", "text": "a"}]'
    for name, prompt in prompts.items():
        is_text = prompt[0] == '"'
        yield f"completions, {name}", "/v1/completions", f'{{"prompt": {prompt}, "max_tokens": 1}}'.encode()
        yield f"embeddings, {name}", "/v1/embeddings", f'{{"input": {prompt}}}'.encode()
        if is_text:
            yield f"tokenize, {name}", "/tokenize", f'{{"prompt": {prompt}}}'.encode()
            yield f"generate, {name}", "/api/generate", f'{{"model": "demo", "prompt": {prompt}}}'.encode()
            yield f"responses, {name}", "/v1/responses", f'{{"input": {prompt}}}'.encode()
            yield f"rerank, {name}", "/v1/rerank", f'{{"query": {prompt}, "documents": ["a"]}}'.encode()
        else:
            yield f"detokenize, {name}", "/detokenize", f'{{"tokens": {prompt}}}'.encode()
    for name, content in {"a text": prompts["short words"], "parts": parts}.items():
        messages = f'"messages": [{user.format(content)}]'
        yield f"chat, {name}", "/v1/chat/completions", f"{{{messages}}}".encode()
        yield f"messages, {name}", "/v1/messages", f'{{{messages}, "max_tokens": 1}}'.encode()
        yield f"count_tokens, {name}", "/v1/messages/count_tokens", f"{{{messages}}}".encode()
        yield f"ollama, {name}", "/api/chat", f'{{{messages}, "model": "demo"}}'.encode()
    short = user.format('"a"')
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},'
    tools = "[" + tool * (SIZE // len(tool)) + tool[:-1] + "]"
    yield "chat, tools", "/v1/chat/completions", f'{{"messages": [{short}], "tools": {tools}}}'.encode()
    unknown = "[" + "[]," * (SIZE // 3) + "[]]"
    yield "chat, an unknown field", "/v1/chat/completions", f'{{"messages": [{short}], "x": {unknown}}}'.encode()
    enum = "[" + '"ab",' * (SIZE // 5) + '"a"]'
    form = f'{{"type": "json_schema", "json_schema": {{"schema": {{"enum": {enum}}}}}}}'
    yield "chat, a schema", "/v1/chat/completions", f'{{"messages": [{short}], "response_format": {form}}}'.encode()


def status_of(served: Served, path: str, body: bytes) -> tuple[int, float]:
    """The status of an answer, and the seconds until it came."""
    began = time.perf_counter()
    request = urllib.request.Request(f"{served.url}{path}", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            return answer.status, time.perf_counter() - began
    except urllib.error.HTTPError as refusal:
        refusal.close()
        return refusal.code, time.perf_counter() - began


def short_answer(served: Served) -> float:
    status, seconds = status_of(served, "/v1/completions", b'{"prompt": "the", "max_tokens": 2}')
    assert status == 200
    return seconds


def megabytes(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(name))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process as Linux shows it")
@pytest.mark.parametrize(("most_bytes", "at_once"), [(service.BODY_BYTES, 4), (16 << 20, 1)], ids=str)
def test_8_mb_to_any_api_take_little_memory_and_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, at_once: int
) -> None:
    """A refusal takes a second and 64 MB at most, and a short request beside it half a second more."""
    monkeypatch.setattr(service, "BODY_BYTES", most_bytes)
    runtime = make_runtime(sequences=1, context=256, budget=MemoryBudget(62 << 20))
    with serving({"demo": runtime}, ollama=True) as served, ThreadPoolExecutor(at_once + 1) as pool:
        usual = sorted(short_answer(served) for _ in range(20))[10]
        for name, path, body in large_inputs():
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
            before, slowest = megabytes("VmRSS"), 0.0
            answers = [pool.submit(status_of, served, path, body) for _ in range(at_once)]
            while not all(each.done() for each in answers):
                slowest = max(slowest, short_answer(served))
            assert all(400 <= each.result()[0] < 500 for each in answers), name
            assert max(each.result()[1] for each in answers) < MOST_REFUSAL_S, name
            assert slowest < usual + MOST_STALL_S, name
            assert megabytes("VmHWM") - before < MOST_MB * at_once, name
