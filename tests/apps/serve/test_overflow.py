"""`--overflow` and `--overflow-model`: only requests that cannot be answered now go elsewhere, with the reason."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from runtimes import make_runtime
from serving import Served, SlowEngine, eventually, serving

from edgekit.apps.serve.models import Models
from edgekit.apps.serve.service import Service
from edgekit.apps.serve.settings import ServerSettings
from edgekit.common.options import read_options
from edgekit.errors import InvalidInput

SERVER = "https://llm.example.org/v1"


def test_prompt_that_does_not_fit_is_redirected_and_invalid_one_is_not() -> None:
    with serving(overflow=SERVER) as served:
        long = httpx.post(f"{served.v1}/completions", json={"prompt": "x" * 5000, "max_tokens": 5})
        assert long.status_code == 307 and long.headers["location"] == f"{SERVER}/completions"
        assert long.headers["x-edgekit-overflow"] == "does not fit"
        wrong = httpx.post(f"{served.v1}/completions", json={"prompt": "x", "max_tokens": -1})
        assert wrong.status_code == 400 and "location" not in wrong.headers
        assert httpx.post(f"{served.v1}/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_without_the_option_nothing_is_redirected() -> None:
    with serving() as served:
        long = httpx.post(f"{served.v1}/completions", json={"prompt": "x" * 5000, "max_tokens": 5})
        assert long.status_code == 400 and "location" not in long.headers


def test_full_queue_redirects_the_same_request() -> None:
    body = {"prompt": "x", "max_tokens": 40}
    with (
        serving() as other,
        serving({"tiny": make_runtime(SlowEngine(0.05), sequences=1)}, max_queued=0, overflow=other.v1) as served,
    ):
        first = threading.Thread(target=lambda: httpx.post(f"{served.v1}/completions", json=body, timeout=60))
        first.start()
        while served.service.admission.active == 0:
            pass
        sent = httpx.post(f"{served.v1}/completions", json=body, follow_redirects=True, timeout=60)
        first.join()
    assert sent.status_code == 200 and str(sent.url) == f"{other.v1}/completions"
    assert sent.history[0].headers["x-edgekit-overflow"] == "queue too long"


HELLO = [{"role": "user", "content": "the cat"}]
CHAT = {"model": "large", "messages": HELLO, "max_tokens": 3}


@contextmanager
def busy(small: Any = None, **settings: Any) -> Iterator[Served]:
    """A server of `large`, which runs one answer and refuses a second, and `small`."""
    models = {"large": make_runtime(SlowEngine(0.02), sequences=1), "small": small or make_runtime()}
    with serving(models, max_queued=0, overflow_model="small", **settings) as served:
        body = {**CHAT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{served.v1}/chat/completions", json=body, timeout=60) as first:
            lines = first.iter_lines()  # dropping the iterator would close the response
            next(lines)
            yield served
        eventually(lambda: served.service.admission.active == 0)


def test_conversation_that_would_wait_is_answered_by_the_smaller_model() -> None:
    anthropic = {"model": "large", "messages": HELLO, "max_tokens": 3}
    ollama = {"model": "large", "messages": HELLO, "options": {"num_predict": 3}, "stream": False}
    with busy(ollama=True) as served:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/responses", {"model": "large", "input": "the cat", "max_output_tokens": 3}),
            ("/v1/messages", anthropic),
            ("/api/chat", ollama),
        ):
            answer = httpx.post(served.url + path, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "small"
            assert answer.headers["x-edgekit-overflow"] == "queue too long"
            assert answer.headers.get("x-edgekit-model", "small") == "small"
        with httpx.stream("POST", f"{served.v1}/chat/completions", json={**CHAT, "stream": True}) as streamed:
            assert streamed.headers["x-edgekit-overflow"] == "queue too long"
            assert '"model":"small"' in "".join(streamed.iter_text())
        counted = httpx.get(f"{served.url}/metrics").text
    assert 'edgekit_overflows_total{reason="queue too long",to="smaller"} 5' in counted


def test_moved_conversation_has_the_text_of_the_smaller_model() -> None:
    body = {**CHAT, "max_tokens": 12, "temperature": 1, "seed": 7}
    with busy() as served:
        moved = httpx.post(f"{served.v1}/chat/completions", json=body).json()
        asked = httpx.post(f"{served.v1}/chat/completions", json={**body, "model": "small"}).json()
    assert moved["choices"] == asked["choices"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"logit_bias": {"5": 1}}),
        ("/v1/chat/completions", {"stop_token_ids": [5]}),
        ("/v1/chat/completions", {"edgekit": {"stop_tokens": [5]}}),
        ("/v1/completions", {"prompt": "the cat"}),
    ],
)
def test_requests_that_may_mean_one_tokenizer_stay(path: str, more: dict[str, Any]) -> None:
    body = {"model": "large", "max_tokens": 3, **({} if "prompt" in more else {"messages": HELLO}), **more}
    with busy() as served:
        assert httpx.post(served.url + path, json=body).status_code == 503


def test_what_does_not_fit_stays_and_what_nobody_can_answer_is_redirected() -> None:
    with busy(make_runtime(SlowEngine(0.02), sequences=1), overflow=SERVER) as served:
        text = [{"role": "user", "content": "x" * 5000}]
        long = httpx.post(f"{served.v1}/chat/completions", json={**CHAT, "model": "small", "messages": text})
        assert (long.status_code, long.headers["x-edgekit-overflow"]) == (307, "does not fit")
        body = {**CHAT, "model": "small", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{served.v1}/chat/completions", json=body, timeout=60) as other:
            lines = other.iter_lines()
            next(lines)
            sent = httpx.post(f"{served.v1}/chat/completions", json=CHAT)
    assert (sent.status_code, sent.headers["location"]) == (307, f"{SERVER}/chat/completions")


def test_smaller_model_must_be_served() -> None:
    with pytest.raises(InvalidInput, match="the overflow model 'tiny' is not served; name one of large"):
        Service.of(Models({"large": make_runtime()}), ServerSettings(overflow_model="tiny"))


@pytest.mark.parametrize("url", ["llm.example.org", "ftp://x/v1", "https://x/v1\r\nx: y"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="overflow"):
        read_options(ServerSettings, {"overflow": url})
