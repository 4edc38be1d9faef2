"""Distributions of the latencies and lengths of requests, with the bounds of vLLM's, so that their quantiles agree."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgekit.runtime.metrics import Timings

_FIRST_TOKEN_S = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_BETWEEN_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
REQUEST_S = (
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Histogram:
    """Counts of values: `counts[i]` of those above `bounds[i - 1]` and at most `bounds[i]`; the last has no bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def observe(self, value: float, count: int = 1) -> None:
        """Add `value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def quantile(self, share: float) -> float | None:
        """Return the lowest bound that covers `share` of the values; None without values, or above all bounds."""
        wanted, seen = share * self.count, 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if seen and seen >= wanted:
                return bound
        return None

    def copy(self) -> Histogram:
        """Return a histogram that later values do not change."""
        copied = Histogram(self.bounds)
        copied.counts, copied.sum = self.counts.copy(), self.sum
        return copied


class RequestHistograms:
    """The histograms of all requests since a runtime was opened, by the names of `/metrics`."""

    def __init__(self) -> None:
        self._between = Histogram(_BETWEEN_S)
        self._first_token = Histogram(_FIRST_TOKEN_S)
        self._total, self._queue, self._prefill, self._decode = (Histogram(REQUEST_S) for _ in range(4))
        self._prompt, self._generated = Histogram(_TOKENS), Histogram(_TOKENS)

    def add_tokens(self, seconds: float, count: int) -> None:
        """Add the tokens of one step, `seconds` after the token before them."""
        self._between.observe(seconds / count, count)

    def add_ended(self, timings: Timings) -> None:
        """Add a request that ended without an error."""
        self._total.observe(timings.total_s)
        self._queue.observe(timings.queue_s)
        self._prefill.observe(timings.prefill_s)
        self._prompt.observe(timings.prompt_tokens)
        if timings.first_token_s is not None:
            self._first_token.observe(timings.first_token_s)
            self._decode.observe(timings.decode_s)
            self._generated.observe(timings.tokens)

    def copies(self) -> dict[str, Histogram]:
        """Return a copy of each histogram by its name."""
        named = {
            "time_to_first_token_seconds": self._first_token,
            "inter_token_latency_seconds": self._between,
            "e2e_request_latency_seconds": self._total,
            "request_queue_time_seconds": self._queue,
            "request_prefill_time_seconds": self._prefill,
            "request_decode_time_seconds": self._decode,
            "request_prompt_tokens": self._prompt,
            "request_generation_tokens": self._generated,
        }
        return {name: histogram.copy() for name, histogram in named.items()}
