"""What the tests of measuring share: fake artifacts whose target other processes find, and measurements made up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from click.testing import CliRunner
from fake_artifacts import make_artifact

from edgekit.apps.bench.machine import Disturbance, Usage
from edgekit.apps.bench.measurement import (
    Conditions,
    Measurement,
    RequestTimes,
    Trial,
)
from edgekit.apps.bench.statistics import summaries
from edgekit.apps.bench.workload import Case, PromptText, Workload, WorkloadRequest
from edgekit.artifact.artifact import Artifact, open_artifact, seal
from edgekit.cli import command
from edgekit.common.staging import staging_for
from edgekit.contracts.manifest import MANIFEST
from edgekit.errors import EdgekitError


def fake(folder: Path, *, seed: int = 0) -> Artifact:
    return open_artifact(make_artifact(folder, seed=seed))


def workload(*, prompt: int = 24, outputs: int = 8, repeats: int = 3, warmups: int = 1, depth: int = 0) -> Workload:
    """One case of one request."""
    request = WorkloadRequest(
        prompt=(PromptText(synthetic="prose", tokens=prompt),), output_tokens=outputs, depth_tokens=depth
    )
    return Workload(
        name="small",
        title="A small one",
        warmups=warmups,
        repeats=repeats,
        cases=(Case(name="one", requests=(request,)),),
    )


class StillMachine:
    """A machine on which nothing happens but what the test says."""

    def __init__(self, canaries: Sequence[float] = (), disturbed: Sequence[Disturbance] = ()) -> None:
        self.best_s, self.slept = 0.001, 0.0
        self._canaries, self._disturbed = list(canaries), list(disturbed)
        self._now = 0.0

    def canary(self) -> float:
        return self._canaries.pop(0) if self._canaries else 1.0

    def usage(self, processes: Sequence[int]) -> Usage:
        from time import perf_counter

        return Usage(perf_counter(), 0.0, 0.0, 0.0, {})

    def between(self, before: Usage, after: Usage) -> Disturbance:
        return self._disturbed.pop(0) if self._disturbed else Disturbance(0.0, 0.0)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


MADE = Measurement.model_validate_json(
    json.dumps(yaml.safe_load((Path(__file__).parents[1] / "data/measurement.yaml").read_text()))
)


def conditions(**known: Any) -> Conditions:
    return Conditions(**(dict(MADE.conditions) | known))


def trial(decode: float, *, invalid: Any = None) -> Trial:
    """A trial of 100 prompt tokens, read at 1,000 a second, and five that are decoded at this speed."""
    gap = 1 / decode
    times = RequestTimes(
        prompt_tokens=100, timed_tokens=100, tokens=5, prefill_s=0.1, first_token_s=0.1, decode_s=gap * 4,
        gaps_s=(gap,) * 4,
    )  # fmt: skip
    return Trial(
        repeat=0, attempt=0, requests=(times,), total_s=0.1 + gap * 5, canary_before=1.0, canary_after=1.0,
        waited_share=0.0, others_share=0.0, invalid=invalid,
    )  # fmt: skip


def measurement(
    speeds: Sequence[float], *, name: str = "onnx cpu s4-g64", invalid: Sequence[float] = (), **known: Any
) -> Measurement:
    """A measurement whose trials decode at these speeds."""
    trials = (*(trial(speed) for speed in speeds), *(trial(speed, invalid="contended") for speed in invalid))
    subject = MADE.subject.model_copy(update={"name": name})
    case = MADE.cases[0].model_copy(update={"trials": trials, "summary": summaries(trials)})
    return Measurement(**(dict(MADE) | {"subject": subject, "cases": (case,)} | known))


def resealed(source: Path, place: Path, change: Any) -> Path:
    """A copy of an artifact in which `change(folder)` altered files, sealed anew: whole, and wrong."""
    artifact = open_artifact(source)
    staging = staging_for(place, 1 << 20)
    for name in artifact.manifest.files:
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, staging / name)
    change(staging)
    plan = artifact.plan.model_copy(update={"model_source": artifact.made_of})
    seal(
        staging, place, plan, weights_sha256=artifact.manifest.weights_sha256, tools={"test": "1"},
        self_check="damaged on purpose",
    )  # fmt: skip
    assert (place / MANIFEST).exists()
    return place


def edit_json(path: Path, change: Any) -> None:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


class Invoked(NamedTuple):
    """What a command did."""

    code: int
    stdout: str
    output: str


def invoked(arguments: Sequence[str]) -> Invoked:
    """A command, as `edgekit` runs it: what it returns is its exit code."""
    done = CliRunner().invoke(command, list(arguments), standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return Invoked(done.return_value or 0, done.stdout, done.output)


def refused(action: Any) -> str:
    """The one line with which something is refused."""
    try:
        action()
    except EdgekitError as error:
        return str(error)
    raise AssertionError("it was not refused")
