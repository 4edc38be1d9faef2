"""Running an artifact and serving it connect to nothing, and look no name up."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

import edgekit
from edgekit.apps.serve import app

DEMO = Path(edgekit.__file__).parent / "_demo/artifact"
CHAT = [{"role": "user", "content": "def add(a, b):"}]


@pytest.fixture(autouse=True)
def _no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **options: Any) -> NoReturn:
        raise AssertionError(f"a connection: {given[1:]}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)


def test_an_artifact_runs_without_a_connection() -> None:
    pytest.importorskip("onnxruntime")
    with edgekit.open(DEMO, draft="ngram") as runtime:
        assert runtime.generate("def add(a, b):", max_tokens=4, regex="[a-z ]+").tokens
        assert runtime.score("def", [" add"])
        assert runtime.chat(CHAT, max_tokens=2).tokens


def test_a_server_answers_without_a_connection() -> None:
    pytest.importorskip("onnxruntime")

    async def ask() -> list[int]:
        with edgekit.open(DEMO) as runtime:
            transport = httpx.ASGITransport(app({"demo": runtime}))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                bodies = {
                    "/v1/completions": {"prompt": "def", "max_tokens": 2},
                    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
                    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
                    "/tokenize": {"prompt": "def"},
                }
                answers = [await client.post(path, json=body) for path, body in bodies.items()]
                answers += [await client.get(path) for path in ("/metrics", "/readyz", "/v1/models")]
                return [answer.status_code for answer in answers]

    assert set(asyncio.run(ask())) == {200}
