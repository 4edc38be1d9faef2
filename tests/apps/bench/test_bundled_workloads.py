"""Every bundled workload runs to its end on a real engine, at a sixteenth of its length."""

from __future__ import annotations

from pathlib import Path

import measured
import pytest
import tiny_models

from edgekit import OpenOptions
from edgekit.apps.bench.artifact_subjects import subject_of_artifact
from edgekit.apps.bench.measurement import Measurement
from edgekit.apps.bench.trials import BenchRun
from edgekit.apps.bench.workload import Case, PromptText, Workload, WorkloadRequest, bundled_workloads, read_workload
from edgekit.common.progress import no_progress

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnx_ir")
pytestmark = [pytest.mark.quantize, pytest.mark.onnx]

SHRINK = 16


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEKIT_HOME", str(folder / "home"))
        model = tiny_models.write_tiny(folder / "tiny", max_position_embeddings=2048)
        return tiny_models.artifact_of(model, folder / "artifact", context=1152)


def _part(part: PromptText) -> PromptText:
    return part if part.tokens is None else part.model_copy(update={"tokens": max(2, part.tokens // SHRINK)})


def _request(request: WorkloadRequest) -> WorkloadRequest:
    return request.model_copy(
        update={
            "prompt": tuple(_part(part) for part in request.prompt),
            "output_tokens": max(2, request.output_tokens // SHRINK),
            "depth_tokens": request.depth_tokens // SHRINK,
        }
    )


def _cases(workload: Workload) -> tuple[Case, ...]:
    return tuple(
        Case(name=f"{workload.name}, {case.name}", requests=tuple(_request(request) for request in case.requests))
        for case in workload.cases
    )


def _run(artifact: Path, cases: tuple[Case, ...], **opening: object) -> Measurement:
    subject = subject_of_artifact(artifact, OpenOptions(**opening))  # type: ignore[arg-type]
    asked = Workload(name="all", title="All of them", warmups=0, repeats=1, cases=cases)
    bench = BenchRun(
        [subject],
        asked,
        measured.StillMachine(),
        measured.conditions,
        loads=1,
        progress=no_progress,
    )
    return bench.run()[0]


def test_every_workload_without_a_window_runs_to_its_end_and_an_agent_reuses_its_instructions(artifact: Path) -> None:
    workloads = [found for name in bundled_workloads() if (found := read_workload(name)).window is None]
    assert {"agent", "chat", "code", "grid", "quick", "summarise"} == {one.name for one in workloads}
    found = _run(artifact, tuple(case for one in workloads for case in _cases(one)), prefixes="64MiB")
    assert found.status == "valid", found.why
    assert [case.case for case in found.cases if case.refused] == []
    known = {case.case: [request.cached_tokens for request in case.trials[0].requests] for case in found.cases}
    assert known["agent, shared prefix"][0] == 0
    assert all(count >= 768 // SHRINK for count in known["agent, shared prefix"][1:])
    assert all(count > 0 for count in known["chat, four turns"][1:]), "a turn goes on from what was said"


def test_the_endless_workload_fills_its_window_three_times(artifact: Path) -> None:
    endless = read_workload("endless")
    assert endless.window is not None
    found = _run(artifact, _cases(endless), window=endless.window // SHRINK, sinks=endless.sinks)
    assert found.status == "valid", found.why
    assert found.subject.window == 32
    (request,) = found.cases[0].trials[0].requests
    assert request.tokens == 3 * 32
