"""What a runtime tells: histograms, the log, and where a request is routed and why."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_artifacts import install, make_artifact
from hypothesis import given, strategies as st
from pydantic import ValidationError
from runtimes import codec, make_runtime

import edgekit
from edgekit.common.histogram import Histogram
from edgekit.common.subprocesses import ChildProcess
from edgekit.errors import EdgekitError, LimitExceeded, TargetFailed
from edgekit.route import RoutePolicy
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.testing import FakeEngine


@given(st.lists(st.integers(0, 12).map(float), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_the_lowest_bound_that_covers_the_share(values: list[float], share: float) -> None:
    histogram = Histogram((1, 5, 10))
    for value in values:
        histogram.observe(value)
    covered = [bound for bound in (1, 5, 10) if sum(value <= bound for value in values) >= share * len(values)]
    assert histogram.quantile(share) == (covered[0] if covered else None)
    assert (histogram.count, histogram.sum) == (len(values), sum(values))


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


PROMPT = "naïve cat sat on façade"


class Failing(FakeEngine):
    """An engine whose calls fail when more than one request takes part."""

    def forward(self, chunks):  # type: ignore[no-untyped-def]
        if len(chunks) > 1:
            for chunk in chunks:
                chunk.state.close()
            raise TargetFailed(f"fake: cannot process {PROMPT}")
        return super().forward(chunks)


def test_decisions_are_logged_without_prompts_and_answers(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "artifact")
    caplog.set_level(logging.DEBUG, "edgekit")
    with edgekit.open(tmp_path / "artifact") as runtime:
        texts = [runtime.generate(PROMPT, max_tokens=12).text, runtime.chat([{"role": "user", "content": PROMPT}]).text]
    with make_runtime(
        Failing(vocabulary=codec().vocabulary, max_states=4), budget=MemoryBudget(1 << 22), prefix_bytes=2000
    ) as runtime:
        for wrong in ({"regex": "("}, {"stop": 5}):
            with pytest.raises(EdgekitError):
                runtime.generate(PROMPT, **wrong)  # type: ignore[arg-type]
        streams = [runtime.submit(f"{PROMPT} {each}", max_tokens=12) for each in "abcd"]
        texts += [stream.answer().text for stream in streams]
    worker = ChildProcess(Path(__file__).parents[2] / "edgekit/runtime/generation/template_worker.py", "a test", 0.5)
    endless = "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}"
    request = {"template": endless + PROMPT, "values": {}, "limit_characters": 10}
    with pytest.raises(LimitExceeded):
        worker.ask(request, 100)
    worker.close()
    logged = caplog.text
    for decision in ("opened artifact", "engine call", "dropped", "killed"):
        assert decision in logged, logged
    for text in (PROMPT, *texts):
        for word in text.split():
            assert len(word) < 4 or word not in logged


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "EDGEKIT_LOG"}
    return subprocess.run(
        [sys.executable, "-c", program], env=clean | environment, capture_output=True, text=True, check=True
    )


def test_the_log_is_silent_until_it_is_asked_for() -> None:
    program = "from edgekit.common.log import log; log.warning('a warning'); log.info('a note'); log.debug('a detail')"
    assert run_python(program).stderr == ""
    info = run_python(program, EDGEKIT_LOG="info").stderr
    assert "edgekit WARNING a warning" in info and "a note" in info and "a detail" not in info
    assert "a detail" in run_python(program, EDGEKIT_LOG="debug").stderr
    assert "EDGEKIT_LOG: must be debug or info, found 'loud'" in run_python(program, EDGEKIT_LOG="loud").stderr


def test_an_application_gets_the_records_of_the_logger() -> None:
    program = (
        "import logging; logging.basicConfig(level='INFO', format='app %(name)s %(message)s');"
        "from edgekit.common.log import log; log.info('a note')"
    )
    assert run_python(program).stderr == "app edgekit a note\n"


SERVER = "https://llm.example.org/v1"


FITS = {"prompt_tokens": 100, "max_tokens": 100, "room_tokens": 512}


def test_without_limits_only_requests_that_do_not_fit_leave() -> None:
    policy = RoutePolicy(server=SERVER)
    assert policy.before(**FITS, waiting=1000, tokens_per_second=0.01).where == "here"
    assert policy.after([-9.0]).where == "here"
    route = policy.before(prompt_tokens=500, max_tokens=100, room_tokens=512)
    assert (route.where, route.reason, route.url) == ("server", "does not fit", f"{SERVER}/chat/completions")
    assert route.detail == "500 + 100 tokens, and there is room for 512"


@pytest.mark.parametrize(
    ("state", "reason"), [({"waiting": 5}, "queue too long"), ({"tokens_per_second": 3.0}, "too slow")]
)
def test_waiting_and_slow_requests_go_to_the_smaller_artifact_first(state: dict[str, float], reason: str) -> None:
    limits = {"max_waiting": 4, "min_tokens_per_second": 5.0}
    for has_smaller, where in ((True, "smaller"), (False, "server")):
        route = RoutePolicy(server=SERVER, has_smaller=has_smaller, **limits).before(**FITS, **state)  # type: ignore[arg-type]
        assert (route.where, route.reason) == (where, reason)
    enough = RoutePolicy(server=SERVER, **limits).before(**FITS, waiting=4, tokens_per_second=5.0)  # type: ignore[arg-type]
    assert enough.where == "here" and enough.reason is None


def test_low_confidence_answer_goes_to_the_server_not_a_smaller_model() -> None:
    policy = RoutePolicy(server=SERVER, has_smaller=True, min_confidence=0.5)
    assert policy.after([math.log(0.9), math.log(0.6)]).where == "here"
    route = policy.after([math.log(0.2), math.log(0.3)])
    assert (route.where, route.reason) == ("server", "low confidence") and "0.245" in route.detail


def test_request_stays_without_another_place_and_reasons_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="edgekit"):
        route = RoutePolicy(max_waiting=0).before(**FITS, waiting=1)
    assert (route.where, route.reason, route.url) == ("here", "queue too long", None)
    assert "no other place was given" in caplog.text


@pytest.mark.parametrize("server", ["llm.example.org", "file:///etc/passwd", "https://me:secret@host/v1", ""])
def test_a_server_is_a_url_without_secrets(server: str) -> None:
    with pytest.raises(ValidationError, match="not an http or https URL"):
        RoutePolicy(server=server)
