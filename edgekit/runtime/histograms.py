"""Distributions of the latencies and lengths of requests, with the bounds of vLLM's, so that their quantiles agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.common.histogram import REQUEST_S, Histogram

if TYPE_CHECKING:
    from edgekit.runtime.metrics import Timings

_FIRST_TOKEN_S = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_BETWEEN_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


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
