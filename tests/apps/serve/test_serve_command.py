"""`edgekit serve` as a process: what it prints, how it answers, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_artifacts import install, make_artifact
from serving import eventually

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the cat"}]}


@contextmanager
def served(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Yield a server process and its JSON description."""
    command = [sys.executable, "-m", "edgekit", "serve", *map(str, arguments), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path, monkeypatch)
    path = os.environ["PYTHONPATH"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([path, *(each for each in sys.path if each)]))
    return make_artifact(tmp_path / "tiny")


def test_serve_announces_its_models_and_answers(artifact: Path) -> None:
    with served(f"one={artifact}", artifact, "--alias", "gpt-*=one") as (_, said):
        assert [model["name"] for model in said["models"]] == ["one", "tiny"]
        assert said["models"][0]["context"] == 512
        models = httpx.get(f"{said['url']}/v1/models").json()
        assert [model["id"] for model in models["data"]] == ["one", "tiny"]
        body = {**CHAT, "model": "gpt-5", "max_tokens": 5}
        assert httpx.post(f"{said['url']}/v1/chat/completions", json=body).json()["model"] == "one"
        states = httpx.get(f"{said['url']}/readyz").json()["models"]
        assert states == {"one": "ready", "tiny": "absent"}


def test_sigterm_finishes_running_answers_and_refuses_new_ones(artifact: Path) -> None:
    with served(artifact) as (process, said):
        port = int(said["url"].rpartition(":")[2])
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        # Far more than all buffers hold: the answer runs until it is read.
        more = {"stream": True, "max_tokens": 400, "ignore_eos": True, "n": 4, "logprobs": True, "top_logprobs": 20}
        data = json.dumps({**CHAT, **more}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        received = bytearray(connection.recv(1024))
        assert received.startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{said['url']}/readyz").status_code == 503)
        assert httpx.get(f"{said['url']}/livez").status_code == 200
        refused = httpx.post(f"{said['url']}/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        assert process.poll() is None
        while part := connection.recv(1 << 16):
            received += part
        connection.close()
        text = received.decode("utf-8", "replace")
        assert text.count('"finish_reason":"length"') == 4
        assert "data: [DONE]" in text
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")


def cached_tokens(url: str) -> int:
    body = {"messages": [{"role": "user", "content": "the cat sat on the mat " * 8}], "max_tokens": 1}
    usage = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_saved_prefixes_come_back_after_a_kill(artifact: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with served(artifact, "--prefixes", kept) as (process, said):
        assert cached_tokens(said["url"]) == 0
        eventually(lambda: list(kept.glob("*.prefixes")))
        process.kill()
    with served(artifact, "--prefixes", kept) as (process, said):
        assert cached_tokens(said["url"]) > 40
        process.terminate()
        process.communicate(timeout=60)
    (file,) = kept.glob("*.prefixes")
    file.write_bytes(b"rubbish")
    with served(artifact, "--prefixes", kept) as (process, said):
        assert cached_tokens(said["url"]) == 0
        process.kill()
    file.unlink()
    file.mkdir()  # so that nothing can be saved under this name
    with served(artifact, "--prefixes", kept) as (process, said):
        assert cached_tokens(said["url"]) == 0
        process.terminate()
        assert process.communicate(timeout=60)[1].count("prefixes are not kept") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--alias", "nothing"], "NAME=MODEL"),
        (["--alias", "a=unknown"], "is not served"),
        (["--port", "70000"], "--port"),
    ],
)
def test_unsupported_serve_options_are_refused_in_one_line(artifact: Path, arguments: list[str], reason: str) -> None:
    command = [sys.executable, "-m", "edgekit", "serve", str(artifact), "--port", "0", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
