"""Distributions of latencies and lengths: each value in its bucket, and each request counted once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtimes import codec, make_runtime

from edgekit.common.histogram import Histogram
from edgekit.errors import EdgekitError
from edgekit.testing import FakeEngine


@given(st.lists(st.integers(0, 12).map(float), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_the_lowest_bound_that_covers_the_share(values: list[float], share: float) -> None:
    histogram = Histogram((1, 5, 10))
    for value in values:
        histogram.observe(value)
    covered = [bound for bound in (1, 5, 10) if sum(value <= bound for value in values) >= share * len(values)]
    assert histogram.quantile(share) == (covered[0] if covered else None)
    assert (histogram.count, histogram.sum) == (len(values), sum(values))


def test_a_histogram_without_values_has_no_quantile() -> None:
    assert Histogram((1, 2)).quantile(0.5) is None


def test_each_token_and_each_request_is_counted_once() -> None:
    engine = FakeEngine(vocabulary=codec().vocabulary)
    with make_runtime(engine) as runtime:
        before = runtime.histograms()
        answers = [runtime.generate("the cat", max_tokens=length).timings for length in (1, 5, 9)]
        found = runtime.histograms()
        engine.failures = {engine.forwards + 1}
        with pytest.raises(EdgekitError):
            runtime.generate("the cat", max_tokens=5)
        after = runtime.histograms()
    assert before["request_prompt_tokens"].count == 0
    # The first token of an answer has none before it.
    assert found["inter_token_latency_seconds"].count == sum(answer.tokens - 1 for answer in answers) == 12
    assert found["inter_token_latency_seconds"].sum == pytest.approx(sum(answer.decode_s for answer in answers))
    for name, values in {
        "request_generation_tokens": [answer.tokens for answer in answers],
        "request_prompt_tokens": [answer.prompt_tokens for answer in answers],
        "time_to_first_token_seconds": [answer.first_token_s for answer in answers],
        "request_decode_time_seconds": [answer.decode_s for answer in answers],
    }.items():
        assert found[name].count == 3
        assert found[name].sum == pytest.approx(sum(value or 0 for value in values))
    assert after["e2e_request_latency_seconds"].count == 3


def test_scored_texts_have_no_tokens_of_their_own() -> None:
    with make_runtime() as runtime:
        runtime.score("the cat", [" sat", " ran"])
        found = runtime.histograms()
    assert found["request_prompt_tokens"].count >= 1
    assert found["time_to_first_token_seconds"].count == found["request_generation_tokens"].count == 0
