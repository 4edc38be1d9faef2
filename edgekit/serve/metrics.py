"""Counters and histograms of a server, in Prometheus' text form: edgekit's own names, and vLLM's for its dashboards."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from edgekit.runtime.text_assembler import Piece

# Those of vLLM, so that quantiles of both agree.
FIRST_TOKEN_S = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
BETWEEN_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
REQUEST_S = (
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Histogram:
    """Counts of values up to each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def lines(self, name: str, labels: str) -> list[str]:
        """The series of this histogram."""
        totals = list(accumulate(self._counts))
        heads = _heads(self._bounds, name, labels)
        lines = [f"{head}{total}" for head, total in zip(heads, totals, strict=True)]
        return [*lines, f"{name}_sum{{{labels}}} {self.sum:.6g}", f"{name}_count{{{labels}}} {totals[-1]}"]


@lru_cache(maxsize=512)
def _heads(bounds: tuple[float, ...], name: str, labels: str) -> list[str]:
    """The series' lines without their values: most of a scrape would go into formatting bounds again."""
    edges = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    return [f'{name}_bucket{{{labels},le="{edge}"}} ' for edge in edges]


class ModelHistograms:
    """The histograms of one model, by vLLM's names without their prefix."""

    def __init__(self) -> None:
        self.of = {
            "time_to_first_token_seconds": Histogram(FIRST_TOKEN_S),
            "inter_token_latency_seconds": Histogram(BETWEEN_S),
            "e2e_request_latency_seconds": Histogram(REQUEST_S),
            "request_queue_time_seconds": Histogram(REQUEST_S),
            "request_prefill_time_seconds": Histogram(REQUEST_S),
            "request_decode_time_seconds": Histogram(REQUEST_S),
            "request_prompt_tokens": Histogram(TOKENS),
            "request_generation_tokens": Histogram(TOKENS),
        }


class ServerMetrics:
    """The counters of a server, of the event loop only. The runtimes' own counters are read when they are shown."""

    def __init__(self) -> None:
        self.http: Counter[tuple[str, str, str]] = Counter()  # by route, method and class of status
        self.http_s: dict[str, Histogram] = {}
        self.disconnected = self.failed_streams = 0
        self.overflows: Counter[tuple[str, str]] = Counter()  # by place and reason
        self._models: dict[str, ModelHistograms] = {}

    def count_http(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request that ended. Routes and methods are few: a client cannot make new series."""
        known = method if method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE") else "other"
        self.http[route, known, f"{status // 100}xx"] += 1
        self.http_s.setdefault(route, Histogram(REQUEST_S)).observe(seconds)

    def observe_piece(self, model: str, piece: Piece, seconds: float) -> None:
        """Count the time between pieces, for each token of the newer one."""
        if piece.tokens and piece.finish_reason is None:
            between = self.histograms(model)["inter_token_latency_seconds"]
            between.observe(seconds / len(piece.tokens), len(piece.tokens))

    def observe_answer(self, model: str, piece: Piece) -> None:
        """Count an answer by the timings of its last piece."""
        timings = piece.timings
        assert timings is not None
        values = {
            "time_to_first_token_seconds": timings.first_token_s,
            "e2e_request_latency_seconds": timings.total_s,
            "request_queue_time_seconds": timings.queue_s,
            "request_prefill_time_seconds": timings.prefill_s,
            "request_decode_time_seconds": timings.decode_s,
            "request_prompt_tokens": timings.prompt_tokens,
            "request_generation_tokens": timings.tokens,
        }
        for name, value in values.items():
            if value is not None:
                self.histograms(model)[name].observe(value)

    def observe_embedding(self, model: str, tokens: int, seconds: float) -> None:
        """Count the texts of one request for embeddings."""
        self.histograms(model)["e2e_request_latency_seconds"].observe(seconds)
        self.histograms(model)["request_prompt_tokens"].observe(tokens)

    def histograms(self, model: str) -> dict[str, Histogram]:
        return self._models.setdefault(model, ModelHistograms()).of

    @property
    def models(self) -> dict[str, dict[str, Histogram]]:
        """The histograms of each model that answered."""
        return {name: each.of for name, each in self._models.items()}
