"""`/metrics` in Prometheus' text form, and the dashboard that reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
from serving import Served, serving

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
