"""`GET /metrics`: all counters in Prometheus' text form, by edgekit's names and by vLLM's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from starlette.responses import Response

from edgekit.common.footprint import private_bytes_now

if TYPE_CHECKING:
    from edgekit import Metrics
    from edgekit.apps.serve.call import Call
    from edgekit.apps.serve.pool import PooledModel
    from edgekit.apps.serve.service import Service
    from edgekit.common.histogram import Histogram

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop", "cancelled": "abort", "error": "error"}


class Sample(NamedTuple):
    """A value of one series, and its labels besides the model."""

    value: float
    labels: Mapping[str, str] = {}


class Series(NamedTuple):
    """One family of series of a model: edgekit's name, vLLM's where it has one, and the values."""

    kind: str
    own: str
    theirs: str | None
    help: str
    samples: tuple[Sample, ...]


async def metrics(call: Call) -> Response:
    """Return all counters. The cost depends on the number of series, not of requests."""
    return Response(exposition(call.service), media_type=MEDIA_TYPE)


def exposition(service: Service) -> str:
    """The text that Prometheus scrapes."""
    blocks: dict[str, list[str]] = {}

    def add(kind: str, name: str, help_text: str, lines: list[str]) -> None:
        blocks.setdefault(name, [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]).extend(lines)

    for model, runtime in service.models.runtimes.items():
        label = f'model_name="{escaped(model)}",engine="0"'
        for series in _series(runtime.metrics()):
            suffix = "_total" if series.kind == "counter" else ""
            for name in (f"edgekit_{series.own}", series.theirs and f"vllm:{series.theirs}"):
                if name:
                    lines = [_line(name + suffix, label, sample) for sample in series.samples]
                    add(series.kind, name + suffix, series.help, lines)
        for name, histogram in runtime.histograms().items():
            for prefix in ("edgekit_", "vllm:"):
                lines = histogram_lines(histogram, prefix + name, label)
                add("histogram", prefix + name, name.replace("_", " "), lines)
    for series in _of_server(service):
        suffix = "_total" if series.kind == "counter" else ""
        for name in (series.own, series.theirs):
            if name:
                lines = [_line(name + suffix, "", sample) for sample in series.samples]
                add(series.kind, name + suffix, series.help, lines)
    for route, histogram in service.metrics.http_s.items():
        name = "http_request_duration_seconds"
        lines = histogram_lines(histogram, name, f'handler="{escaped(route)}"')
        add("histogram", name, "seconds of a request", lines)
    return "\n".join(line for block in blocks.values() for line in block) + "\n"


# Kind, edgekit's name, vLLM's name, help, and the value among the counters of a runtime.
_SIMPLE: tuple[tuple[str, str, str | None, str, Callable[[Metrics], float]], ...] = (
    ("gauge", "requests_running", "num_requests_running", "answers being generated", lambda m: m.running),
    ("gauge", "requests_waiting", "num_requests_waiting", "answers that wait for a state", lambda m: m.waiting),
    ("gauge", "kv_cache_usage", "kv_cache_usage_perc", "filled share of running caches", lambda m: m.occupancy or 0),
    ("counter", "prompt_tokens", "prompt_tokens", "tokens of prompts", lambda m: m.prompt_tokens),
    ("counter", "generation_tokens", "generation_tokens", "tokens of answers", lambda m: m.tokens),
    ("counter", "cached_tokens", "prompt_tokens_cached", "prompt tokens from prefixes", lambda m: m.cached_tokens),
    ("counter", "prefix_queries", "prefix_cache_queries", "tokens looked up", lambda m: m.prefix_asked_tokens),
    ("counter", "prefix_hits", "prefix_cache_hits", "tokens found", lambda m: m.prefix_hit_tokens),
    ("counter", "drafted_tokens", "spec_decode_num_draft_tokens", "drafted tokens", lambda m: m.proposed),
    ("counter", "accepted_tokens", "spec_decode_num_accepted_tokens", "right drafted tokens", lambda m: m.accepted),
    ("counter", "evictions", None, "evictions of full windows", lambda m: m.evictions),
    ("counter", "steps", None, "engine calls of the loop", lambda m: m.steps),
    ("counter", "engine_seconds", None, "seconds inside the engine", lambda m: m.engine_s),
    ("counter", "host_seconds", None, "seconds of the loop outside the engine", lambda m: m.host_s),
)


# The same for a model that need not be open.
_OF_MODEL: tuple[tuple[str, str, str, Callable[[PooledModel], float]], ...] = (
    ("gauge", "model_open", "1 where the model is in memory", lambda model: model.state == "ready"),
    ("gauge", "model_memory_bytes", "predicted bytes that the model takes", lambda model: model.taken_bytes),
    ("counter", "model_loads", "times that the model was opened", lambda model: model.loads),
    ("counter", "model_unloads", "times that the model was closed", lambda model: model.unloads),
    ("counter", "model_load_seconds", "seconds of opening the model", lambda model: model.load_s),
)


def _series(now: Metrics) -> Iterator[Series]:
    for kind, own, theirs, text, value in _SIMPLE:
        yield Series(kind, own, theirs, text, (Sample(value(now)),))
    ended = Counter[str]()
    for reason, count in now.finished.items():
        ended[_REASONS[reason]] += count
    samples = tuple(Sample(count, {"finished_reason": reason}) for reason, count in ended.items())
    yield Series("counter", "requests_ended", "request_success", "answers that ended, by reason", samples)
    classes = {
        "states": now.states_bytes,
        "prefixes": now.prefix_bytes,
        "queued": now.queued_bytes,
        "unread": now.unread_bytes,
    }
    memory = tuple(Sample(value, {"class": name}) for name, value in classes.items())
    yield Series("gauge", "memory_bytes", None, "bytes of the runtime by class", memory)


def _of_server(service: Service) -> Iterator[Series]:
    counted, admission = service.metrics, service.admission
    rejected = tuple(Sample(count, {"reason": name}) for name, count in admission.rejected.items())
    moved = tuple(Sample(count, {"to": to, "reason": why}) for (to, why), count in counted.overflows.items())
    theirs = "vllm:http_requests_client_disconnected"
    http = tuple(
        Sample(count, {"handler": route, "method": method, "status": status})
        for (route, method, status), count in counted.http.items()
    )
    private = Sample(private_bytes_now() or 0)
    models = service.models.pool.models
    for kind, name, text, value in _OF_MODEL:
        samples = tuple(Sample(value(model), {"model_name": model.name}) for model in models)
        yield Series(kind, f"edgekit_{name}", None, text, samples)
    yield from (
        Series("counter", "edgekit_rejections", "vllm:admission_rejections", "refused requests", rejected),
        Series("counter", "edgekit_overflows", None, "requests answered elsewhere, by place and reason", moved),
        Series("counter", "edgekit_disconnects", theirs, "requests whose client left", (Sample(counted.disconnected),)),
        Series("counter", "edgekit_failed_streams", None, "streams that failed", (Sample(counted.failed_streams),)),
        Series("counter", "http_requests", None, "requests by route and class of status", http),
        Series("gauge", "edgekit_process_private_bytes", None, "private memory of the process", (private,)),
        Series("gauge", "edgekit_answers_active", None, "answers running or waiting", (Sample(admission.active),)),
    )


def histogram_lines(histogram: Histogram, name: str, labels: str) -> list[str]:
    """The series of a histogram."""
    totals = list(accumulate(histogram.counts))
    heads = _heads(histogram.bounds, name, labels)
    lines = [f"{head}{total}" for head, total in zip(heads, totals, strict=True)]
    return [*lines, f"{name}_sum{{{labels}}} {histogram.sum:.6g}", f"{name}_count{{{labels}}} {totals[-1]}"]


@lru_cache(maxsize=512)
def _heads(bounds: tuple[float, ...], name: str, labels: str) -> list[str]:
    """The series' lines without their values: most of a scrape would go into formatting bounds again."""
    edges = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    return [f'{name}_bucket{{{labels},le="{edge}"}} ' for edge in edges]


def _line(name: str, label: str, sample: Sample) -> str:
    own = ",".join(f'{key}="{escaped(value)}"' for key, value in sample.labels.items())
    labels = ",".join(each for each in (label, own) if each)
    return f"{name}{{{labels}}} {sample.value:.10g}" if labels else f"{name} {sample.value:.10g}"


def escaped(value: str) -> str:
    """The value of a label."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
