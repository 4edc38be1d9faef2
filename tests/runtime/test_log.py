"""The log is silent unless it is asked for, and never has the text of a prompt or an answer."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_artifacts import install, make_artifact
from runtimes import codec, make_runtime

import edgekit
from edgekit.common.subprocesses import ChildProcess
from edgekit.errors import EdgekitError, LimitExceeded, TargetFailed
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.testing import FakeEngine

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
