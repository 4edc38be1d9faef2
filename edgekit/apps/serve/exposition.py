"""`GET /metrics`: all counters in Prometheus' text form, by edgekit's names and by vLLM's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.core import (
    CounterMetricFamily as Counts,
    GaugeMetricFamily as Gauge,
    HistogramMetricFamily as Histograms,
)
from prometheus_client.registry import Collector
from starlette.responses import Response

from edgekit.common.footprint import private_bytes_now

if TYPE_CHECKING:
    from edgekit import Metrics
    from edgekit.apps.serve.call import Call
    from edgekit.apps.serve.pool import PooledModel
    from edgekit.apps.serve.service import Service
    from edgekit.common.histogram import Histogram

_REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop", "cancelled": "abort", "error": "error"}
Family = Gauge | Counts | Histograms


class Series(NamedTuple):
    """One family of series of a model: edgekit's name, vLLM's where it has one, and the values."""

    kind: type[Family]
    own: str
    theirs: str | None
    help: str
    samples: tuple[tuple[float, Mapping[str, str]], ...]  # values, and their labels besides the model


async def metrics(call: Call) -> Response:
    """Return all counters. The cost depends on the number of series, not of requests."""
    return Response(generate_latest(Families(call.service)), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class Families(Collector):
    """All series of a server, as Prometheus collects them."""

    def __init__(self, service: Service) -> None:
        self._service, self._families = service, dict[str, Family]()

    def collect(self) -> Iterator[Family]:
        for model, runtime in self._service.models.runtimes.items():
            labels = {"model_name": model, "engine": "0"}
            for series in _series(runtime.metrics()):
                names = (f"edgekit_{series.own}", f"vllm:{series.theirs}" if series.theirs else None)
                self._add_series(series, names, labels)
            for name, histogram in runtime.histograms().items():
                for prefix in ("edgekit_", "vllm:"):
                    self._add_histogram(prefix + name, name.replace("_", " "), histogram, labels)
        for series in _of_server(self._service):
            self._add_series(series, (series.own, series.theirs), {})
        for route, histogram in self._service.metrics.http_s.items():
            self._add_histogram("http_request_duration_seconds", "seconds of a request", histogram, {"handler": route})
        yield from self._families.values()

    def _add_series(self, series: Series, names: tuple[str | None, ...], labels: Mapping[str, str]) -> None:
        for name in filter(None, names):
            for value, own in series.samples:
                all_labels = {**labels, **own}
                family = self._family(series.kind, name, series.help, all_labels)
                family.add_metric(list(all_labels.values()), value)

    def _add_histogram(self, name: str, text: str, histogram: Histogram, labels: Mapping[str, str]) -> None:
        edges = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(edges, accumulate(histogram.counts), strict=True))
        self._family(Histograms, name, text, labels).add_metric(list(labels.values()), buckets, histogram.sum)

    def _family(self, kind: type[Family], name: str, text: str, labels: Mapping[str, str]) -> Any:
        if name not in self._families:
            self._families[name] = kind(name, text, labels=tuple(labels))
        return self._families[name]


# Kind, edgekit's name, vLLM's name, help, and the value among the counters of a runtime.
_SIMPLE: tuple[tuple[type[Family], str, str | None, str, Callable[[Metrics], float]], ...] = (
    (Gauge, "requests_running", "num_requests_running", "answers being generated", lambda m: m.running),
    (Gauge, "requests_waiting", "num_requests_waiting", "answers that wait for a state", lambda m: m.waiting),
    (Gauge, "kv_cache_usage", "kv_cache_usage_perc", "filled share of running caches", lambda m: m.occupancy or 0),
    (Counts, "prompt_tokens", "prompt_tokens", "tokens of prompts", lambda m: m.prompt_tokens),
    (Counts, "generation_tokens", "generation_tokens", "tokens of answers", lambda m: m.tokens),
    (Counts, "cached_tokens", "prompt_tokens_cached", "prompt tokens from prefixes", lambda m: m.cached_tokens),
    (Counts, "prefix_queries", "prefix_cache_queries", "tokens looked up", lambda m: m.prefix_asked_tokens),
    (Counts, "prefix_hits", "prefix_cache_hits", "tokens found", lambda m: m.prefix_hit_tokens),
    (Counts, "drafted_tokens", "spec_decode_num_draft_tokens", "drafted tokens", lambda m: m.proposed),
    (Counts, "accepted_tokens", "spec_decode_num_accepted_tokens", "right drafted tokens", lambda m: m.accepted),
    (Counts, "evictions", None, "evictions of full windows", lambda m: m.evictions),
    (Counts, "steps", None, "engine calls of the loop", lambda m: m.steps),
    (Counts, "engine_seconds", None, "seconds inside the engine", lambda m: m.engine_s),
    (Counts, "host_seconds", None, "seconds of the loop outside the engine", lambda m: m.host_s),
)


# The same for a model that need not be open.
_OF_MODEL: tuple[tuple[type[Family], str, str, Callable[[PooledModel], float]], ...] = (
    (Gauge, "model_open", "1 where the model is in memory", lambda model: model.state == "ready"),
    (Gauge, "model_memory_bytes", "predicted bytes that the model takes", lambda model: model.taken_bytes),
    (Counts, "model_loads", "times that the model was opened", lambda model: model.loads),
    (Counts, "model_unloads", "times that the model was closed", lambda model: model.unloads),
    (Counts, "model_load_seconds", "seconds of opening the model", lambda model: model.load_s),
)


def _series(now: Metrics) -> Iterator[Series]:
    for kind, own, theirs, text, value in _SIMPLE:
        yield Series(kind, own, theirs, text, ((value(now), {}),))
    ended = Counter[str]()
    for reason, count in now.finished.items():
        ended[_REASONS[reason]] += count
    samples = tuple((count, {"finished_reason": reason}) for reason, count in ended.items())
    yield Series(Counts, "requests_ended", "request_success", "answers that ended, by reason", samples)
    classes = {
        "states": now.states_bytes,
        "prefixes": now.prefix_bytes,
        "queued": now.queued_bytes,
        "unread": now.unread_bytes,
    }
    memory = tuple((value, {"class": name}) for name, value in classes.items())
    yield Series(Gauge, "memory_bytes", None, "bytes of the runtime by class", memory)


def _of_server(service: Service) -> Iterator[Series]:
    counted, admission = service.metrics, service.admission
    rejected = tuple((count, {"reason": name}) for name, count in admission.rejected.items())
    moved = tuple((count, {"to": to, "reason": why}) for (to, why), count in counted.overflows.items())
    theirs = "vllm:http_requests_client_disconnected"
    http = tuple(
        (count, {"handler": route, "method": method, "status": status})
        for (route, method, status), count in counted.http.items()
    )
    private: tuple[float, dict[str, str]] = (private_bytes_now() or 0, {})
    models = service.models.pool.models
    for kind, name, text, value in _OF_MODEL:
        samples = tuple((value(model), {"model_name": model.name}) for model in models)
        yield Series(kind, f"edgekit_{name}", None, text, samples)
    yield from (
        Series(Counts, "edgekit_rejections", "vllm:admission_rejections", "refused requests", rejected),
        Series(Counts, "edgekit_overflows", None, "requests answered elsewhere, by place and reason", moved),
        Series(Counts, "edgekit_disconnects", theirs, "requests whose client left", ((counted.disconnected, {}),)),
        Series(Counts, "edgekit_failed_streams", None, "streams that failed", ((counted.failed_streams, {}),)),
        Series(Counts, "http_requests", None, "requests by route and class of status", http),
        Series(Gauge, "edgekit_process_private_bytes", None, "private memory of the process", (private,)),
        Series(Gauge, "edgekit_answers_active", None, "answers running or waiting", ((admission.active, {}),)),
    )
