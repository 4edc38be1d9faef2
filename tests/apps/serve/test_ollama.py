"""`/api/` as Ollama's own client sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from serving import Served, serving

QUESTION: Any = [{"role": "user", "content": "the cat"}]
OPTIONS: Any = {"num_predict": 12, "temperature": 1, "seed": 3}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[ollama.Client]:
    found = ollama.Client(host=served.url)
    yield found
    found._client.close()


def test_chats_and_generations_are_those_of_the_python_api(served: Served, client: ollama.Client) -> None:
    mine = served.runtime.chat(QUESTION, max_tokens=12, temperature=1.0, seed=3)
    whole = client.chat("tiny", QUESTION, options=OPTIONS)
    assert (whole.message.content, whole.done_reason, whole.eval_count) == (mine.text, "length", 12)
    assert (
        "".join(
            part.message.content or "" for part in client.chat("tiny:latest", QUESTION, options=OPTIONS, stream=True)
        )
        == mine.text
    )
    raw = served.runtime.generate("the cat", max_tokens=12, temperature=1.0, seed=3)
    assert client.generate("tiny", "the cat", raw=True, options=OPTIONS).response == raw.text
    assert client.generate("tiny", "the cat", options=OPTIONS).response == mine.text


def test_streams_are_the_default_and_lines_of_json(served: Served) -> None:
    answer = httpx.post(f"{served.url}/api/chat", json={"model": "tiny", "messages": QUESTION, "options": OPTIONS})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [httpx.Response(200, text=line).json() for line in answer.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def test_models_are_listed(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["tiny"]
    assert [model.model for model in client.ps().models] == ["tiny"]
    assert "completion" in (client.show("tiny").capabilities or [])


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("chat", {"model": "other", "messages": QUESTION}, 404),
        ("chat", {"model": "tiny", "messages": QUESTION, "options": {"temperature": "x"}}, 400),
        ("chat", {"model": "tiny", "messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400),
        ("generate", {"model": "tiny", "prompt": "x", "template": "y"}, 400),
        ("pull", {"model": "tiny"}, 501),
    ],
)
def test_refusals_have_the_form_of_the_api(served: Served, path: str, body: dict[str, Any], status: int) -> None:
    answer = httpx.post(f"{served.url}/api/{path}", json=body)
    assert (answer.status_code, set(answer.json())) == (status, {"error"})


def test_it_is_off_unless_asked_for() -> None:
    with serving() as served:
        assert httpx.get(f"{served.url}/api/tags").status_code == 404
