"""`--overflow`: only requests that this server cannot answer are redirected, with the reason."""

from __future__ import annotations

import threading

import httpx
import pytest
from runtimes import make_runtime
from serving import SlowEngine, serving

from edgekit.common.options import read_options
from edgekit.errors import InvalidInput
from edgekit.serve.settings import ServerSettings

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


@pytest.mark.parametrize("url", ["llm.example.org", "ftp://x/v1", "https://x/v1\r\nx: y"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="overflow"):
        read_options(ServerSettings, {"overflow": url})
