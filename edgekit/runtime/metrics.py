"""Counters and timings of one request, and of a runtime since it was opened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter

from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.histogram import REQUEST_S, Histogram

# The bounds of vLLM's distributions, so that quantiles agree.
_FIRST_TOKEN_S = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_BETWEEN_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_HISTOGRAMS = {
    "time_to_first_token_seconds": _FIRST_TOKEN_S,
    "inter_token_latency_seconds": _BETWEEN_S,
    "e2e_request_latency_seconds": REQUEST_S,
    "request_queue_time_seconds": REQUEST_S,
    "request_prefill_time_seconds": REQUEST_S,
    "request_decode_time_seconds": REQUEST_S,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
}
# The fields of `Timings` that `Metrics` adds up.
_SUMMED = ("prompt_tokens", "cached_tokens", "tokens", "proposed", "accepted", "queue_s", "prefill_s", "decode_s")


class Timings(Frozen):
    """The seconds of each part of one answer, and its token counts."""

    queue_s: float = 0.0  # from submission to admission
    first_token_s: float | None = None  # from submission to the first token
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt that came from the prefix cache
    prefill_s: float = 0.0  # from admission to the first token
    tokens: int = 0
    decode_s: float = 0.0  # from the first token to the last
    proposed: int = 0
    accepted: int = 0

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Processed prompt tokens per second; cached ones do not count."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first, per second."""
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s > 0 else None


@dataclass(slots=True)
class RequestCounters:
    """Counters and times of one request. Times are readings of `perf_counter`; 0: not reached yet."""

    submitted_at: float
    started_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    cached_tokens: int = 0
    prefill_chunks: int = 0
    proposed: int = 0
    accepted: int = 0
    evictions: int = 0

    def timings(self, prompt_tokens: int, tokens: int) -> Timings:
        """Return the times up to now."""
        now = perf_counter()
        started, first = self.started_at or now, self.first_token_at or None
        return Timings(
            queue_s=started - self.submitted_at,
            first_token_s=first - self.submitted_at if first else None,
            total_s=now - self.submitted_at,
            prompt_tokens=prompt_tokens,
            cached_tokens=self.cached_tokens,
            prefill_s=(first or now) - started,
            tokens=tokens,
            decode_s=self.last_token_at - first if first else 0.0,
            proposed=self.proposed,
            accepted=self.accepted,
        )


class Metrics(Frozen):
    """Counters of a runtime since it was opened."""

    requests: int = 0
    finished: dict[str, int] = Field(default_factory=dict)  # ended requests by finish reason; "error": failed ones
    waiting: int = 0
    running: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    evictions: int = 0
    steps: int = 0
    engine_s: float = 0.0  # inside the engine
    host_s: float = 0.0  # inside the scheduler, outside the engine
    # Sums over ended requests:
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    # Now:
    kv_tokens: int = 0  # in the KV caches of running requests
    kv_capacity_tokens: int = 0  # of these caches
    states_bytes: int = 0
    peak_kv_bytes: int = 0  # the most bytes that tokens filled in all caches at once
    queued_bytes: int = 0  # waiting requests
    unread_bytes: int = 0  # pieces of answers that nobody has read yet
    prefix_bytes: int = 0
    prefix_runs: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_hit_tokens: int = 0
    prefix_asked_tokens: int = 0
    pressure_steps: dict[str, int] = Field(default_factory=dict)  # steps of the fit guard since the opening
    pressure_now: tuple[str, ...] = ()  # steps in force
    saving_now: tuple[str, ...] = ()  # measures against heat or a low battery, in force or impossible

    @property
    def occupancy(self) -> float | None:
        """The share of the KV capacity of running requests that is filled; None where none runs."""
        return self.kv_tokens / self.kv_capacity_tokens if self.kv_capacity_tokens else None

    @property
    def prefix_hit_rate(self) -> float | None:
        """The share of all prompt tokens that the prefix cache had; None before the first look-up."""
        return self.prefix_hit_tokens / self.prefix_asked_tokens if self.prefix_asked_tokens else None


def _distributed(timings: Timings) -> dict[str, float]:
    """Return the values of an ended request by the names of their histograms."""
    observed: dict[str, float] = {
        "e2e_request_latency_seconds": timings.total_s,
        "request_queue_time_seconds": timings.queue_s,
        "request_prefill_time_seconds": timings.prefill_s,
        "request_prompt_tokens": timings.prompt_tokens,
    }
    if timings.first_token_s is not None:
        observed["time_to_first_token_seconds"] = timings.first_token_s
        observed["request_decode_time_seconds"] = timings.decode_s
        observed["request_generation_tokens"] = timings.tokens
    return observed


@dataclass
class RuntimeCounters:
    """The running sums behind `Metrics`, under the same names, and the histograms."""

    requests: int = 0
    steps: int = 0
    engine_s: float = 0.0
    host_s: float = 0.0
    peak_kv_bytes: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    evictions: int = 0
    of_timings: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMMED, 0))
    histograms: dict[str, Histogram] = field(  # by the names of `/metrics`
        default_factory=lambda: {name: Histogram(bounds) for name, bounds in _HISTOGRAMS.items()}
    )

    def add_tokens(self, seconds: float, count: int) -> None:
        """Add the tokens of one step, `seconds` after the token before them."""
        self.histograms["inter_token_latency_seconds"].observe(seconds / count, count)

    def add_ended(self, reason: str, timings: Timings, evictions: int) -> None:
        """Add a request that ended."""
        if reason != "error":
            for name, value in _distributed(timings).items():
                self.histograms[name].observe(value)
        self.finished[reason] += 1
        self.evictions += evictions
        for name in _SUMMED:
            self.of_timings[name] += getattr(timings, name)

    def metrics(self, **now: int) -> Metrics:
        """Return these sums as `Metrics`, with the current figures `now`."""
        sums = {name: value for name, value in vars(self).items() if name in Metrics.model_fields}
        return Metrics.model_validate({**sums, **self.of_timings, "finished": dict(self.finished), **now})
