"""The chat page, the description of the API, and the metrics with the dashboard that reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from browser import Browser, browser, chromium
from runtimes import codec, make_runtime
from serving import Served, SlowEngine, eventually, serving

from edgekit.apps.serve.application import ROUTES
from edgekit.apps.serve.page import PATHS
from edgekit.runtime.generation.chat_template import ChatTemplate
from edgekit.testing import FakeEngine


def test_the_page_loads_only_its_own_files() -> None:
    with serving() as served:
        for path in PATHS:
            answer = httpx.get(served.url + path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert not re.search(r"https?://|[\"'(]//[a-z]|innerHTML|eval\(|style=|onclick=", answer.text)
    with serving(page=False) as served:
        assert httpx.get(served.url).status_code == 404
    with serving(page=False, ollama=True) as served:
        assert httpx.get(served.url).text == "Ollama is running"


def test_every_body_that_is_read_is_described() -> None:
    with serving() as served:
        document = httpx.get(f"{served.url}/openapi.json").json()
        posted = {path for method, path, _ in ROUTES if method == "POST"}
        assert {path for path, kinds in document["paths"].items() if "post" in kinds} == posted
        model = document["components"]["schemas"]["ChatBody"]["properties"]["model"]
        assert model["anyOf"][0]["examples"] == ["tiny"]


def texts(tab: Browser, selector: str) -> list[str]:
    found: list[str] = tab.value(f"[...document.querySelectorAll({selector!r})].map((each) => each.textContent)")
    return found


def written(tab: Browser) -> list[str]:
    """The texts of the answers on the page."""
    return texts(tab, "article.assistant .content")


def press(tab: Browser, selector: str) -> None:
    tab.value(f"document.querySelector({selector!r}).click()")


def is_running(tab: Browser) -> bool:
    return not tab.value("document.getElementById('stop').hidden")


def send(tab: Browser, text: str, **fields: object) -> None:
    """Fill in the form, as a user would, and send it."""
    for name, value in {**fields, "text": text}.items():
        tab.value(f"document.getElementById({name!r}).value = {str(value)!r}")
    tab.value("document.getElementById('form').requestSubmit()")


needs_a_browser = pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")


@needs_a_browser
def test_the_page_chats_in_a_browser() -> None:
    encoder = FakeEngine(vocabulary=codec().vocabulary)
    encoder.capabilities = encoder.capabilities.model_copy(update={"generates": False})
    models = {"tiny": make_runtime(SlowEngine(0.01)), "encoder": make_runtime(encoder), "other": make_runtime()}
    with serving(models) as served, browser() as tab:
        tab.visit(served.url)
        eventually(lambda: texts(tab, "#model option") == ["tiny", "other"])  # an encoder writes no text
        chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat"}]
        mine = served.runtime.chat(chat, max_tokens=20, temperature=1.0, seed=3).text
        asked = {"system": "be brief", "seed": 3, "temperature": 1, "tokens": 20}
        figures = r"20 written, first token after \d+ ms, [\d.]+ tokens/s, \d+ MiB of memory"
        for _ in range(2):  # a seed gives the same text again
            send(tab, "the cat", **asked)
            eventually(lambda: written(tab) and not is_running(tab))
            assert json.dumps(mine, ensure_ascii=False) in tab.value("Object.values(localStorage).join()")
            eventually(lambda: re.search(figures, texts(tab, "#figures")[0]))
            press(tab, "#reset")
            assert written(tab) == []
        send(tab, "the cat", **{**asked, "tokens": 400})
        eventually(lambda: written(tab) and len(written(tab)[0]) > 5)
        before = len(written(tab)[0])
        eventually(lambda: len(written(tab)[0]) > before)  # it streams
        assert is_running(tab)
        press(tab, "#stop")
        eventually(lambda: not is_running(tab) and served.service.admission.active == 0)
        eventually(lambda: served.runtime.metrics().finished.get("cancelled") == 1)
        assert written(tab)[0] and texts(tab, ".note") == ["Stopped."]
        assert all(url.startswith((served.url, "data:")) for url in tab.requested())
        assert tab.complaints() == []  # the policy for content was kept


@needs_a_browser
def test_the_page_shows_markdown_safely_and_keeps_a_conversation_through_faults() -> None:
    runtime = make_runtime(SlowEngine(0.01))
    runtime.template = ChatTemplate({"default": "{{ messages[-1].content }}<think>"}, {})
    with serving({"tiny": runtime}) as served, browser() as tab:
        tab.visit(served.url)
        eventually(lambda: texts(tab, "#model option"))
        tab.value(Path(__file__).with_name("page_checks.js").read_text())
        eventually(lambda: tab.value("checked") is not None, 60)
        assert tab.value("checked") == "right"
        before = texts(tab, "article")
        tab.visit(served.url)
        assert texts(tab, "article") == before and len(before) == 2
        for _ in range(2):  # the second press deletes
            press(tab, "#list button:last-child")
        assert texts(tab, "article") == [] and texts(tab, "#list li") == []


DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana_dashboard.json"


# What vLLM's own dashboards ask for.
OF_VLLM = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket", "http_requests_total",
)  # fmt: skip


def scraped(served: Served) -> dict[str, set[str]]:
    """The names of the samples, and the labels of each."""
    found: dict[str, set[str]] = {}
    for line in httpx.get(f"{served.url}/metrics").text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP|TYPE) [a-zA-Z_:]\w*[\w:]* .+", line), line
            continue
        sample = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
        assert sample is not None, line
        float(sample[3])
        labels = re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', sample[2] or "")
        found.setdefault(sample[1], set()).update(labels)
    return found


def test_the_dashboard_asks_for_what_there_is() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    with serving() as served:
        body = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 5}
        httpx.post(f"{served.v1}/chat/completions", json=body)
        served.service.admission.rejected["requests"] += 1  # this series begins with the first refusal
        found = scraped(served)
    asked = {name for query in queries for name in re.findall(r"\b(?:edgekit|http|vllm)_?[\w:]+", query)}
    assert len(asked) > 20
    assert asked <= set(found)
    for query in queries:
        for name, labels in re.findall(r"([a-z0-9_]+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=", labels)) <= found[name]
        for labels in re.findall(r"by \(([^)]*)\)", query):
            names = re.findall(r"\b(?:edgekit|http)_\w+", query)
            assert {each.strip() for each in labels.split(",")} <= set().union(*(found[name] for name in names))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_names_of_vllm_are_there() -> None:
    with serving() as served:
        body = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 5}
        httpx.post(f"{served.v1}/chat/completions", json=body)
        assert set(OF_VLLM) <= set(scraped(served))
