"""The native runner, built against the wheel's libraries: results, answers and refusals."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("executorch")
pytest.importorskip("transformers")

import family_models as models
from edgekit_executorch.engine import ExecutorchEngine
from edgekit_executorch.layout import PROGRAM
from executorch_models import SLOTS, sealed_program
from executorch_wheel import attention_library, installed_folder
from fake_adb import SERIAL, Phone
from kept import ROOT, kept

from edgekit.apps.bench.measurement import Measurement
from edgekit.apps.bench.workload import Case, PromptText, Workload, WorkloadRequest
from edgekit.apps.lab.devices import DeviceLimits, DeviceSpec, connect
from edgekit.apps.lab.runner_job import RunnerJob, check_answer, job_of
from edgekit.artifact.artifact import Artifact
from edgekit.contracts.engine import Chunk

SOURCE = Path(__file__).parents[3] / "examples" / "runner"
pytestmark = [
    pytest.mark.executorch,
    pytest.mark.quantize,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the runner reads Linux's own files"),
    pytest.mark.skipif(
        any(shutil.which(name) is None for name in ("cmake", "g++")),
        reason="nothing compiles here: install cmake and g++",
    ),
]
WORKLOAD = Workload(
    name="small",
    title="Two turns",
    warmups=1,
    repeats=2,
    cases=(
        Case(
            name="two turns",
            requests=(
                WorkloadRequest(prompt=(PromptText(synthetic="prose", tokens=20),), output_tokens=6, depth_tokens=5),
                WorkloadRequest(prompt=(PromptText(synthetic="code", tokens=7),), output_tokens=9, continues=True),
            ),
        ),
        Case(
            name="too long", requests=(WorkloadRequest(prompt=(PromptText(text="a", tokens=SLOTS),), output_tokens=6),)
        ),
    ),
)


class Ran(NamedTuple):
    code: int
    out: str
    told: str  # its last word


class Runner(NamedTuple):
    """The built program."""

    path: Path

    def run(self, *words: object, operators: str = "") -> Ran:
        command = [str(self.path), *map(str, words)]
        env = {**os.environ, "EDGEKIT_OPERATORS": operators}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        return Ran(done.returncode, done.stdout, (done.stderr.strip().splitlines() or [""])[-1])

    def generate(self, artifact: Artifact, tokens: Sequence[int], count: int, chunk: int, operators: str) -> list[int]:
        ran = self.run("generate", artifact.folder / PROGRAM, 1, chunk, count, *tokens, operators=operators)
        assert ran.code == 0, ran.told
        return [int(word) for word in ran.out.split()]

    def measure(self, artifact: Artifact, question: RunnerJob, folder: Path) -> Ran:
        path = folder / "question.json"
        path.write_text(question.model_dump_json())
        return self.run("measure", artifact.folder, path)


@pytest.fixture(scope="session")
def runner() -> Runner:
    def build(folder: Path) -> None:
        configure = ["cmake", "-S", str(SOURCE), "-B", str(folder), f"-DCMAKE_PREFIX_PATH={installed_folder()}"]
        for command in (configure, ["cmake", "--build", str(folder)]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    # The program finds its libraries by the path of the folder that it was linked with.
    sources = (SOURCE.relative_to(ROOT).as_posix(), "edgekit/apps/native")
    return Runner(kept(build, sources, "the phone's runner", str(installed_folder())) / "edgekit_runner")


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """A quantised artifact, the same with an 8-bit cache, and a float one with windows in some layers."""
    found = {}
    for name, family, recipe, kv_bits, layers in (
        ("qwen2", "qwen2", "s4-g32", 32, 1),
        ("narrow", "qwen2", "s4-g32", 8, 1),
        ("gemma3", "gemma3", "float32", 32, 2),
    ):
        place = tmp_path_factory.mktemp(name)
        found[name] = sealed_program(place, family, recipe, kv_bits, layers=layers)
    return found


def executorchs_operators() -> str:
    """ExecuTorch's attention library, which exists only for Python, and the libpython that it needs."""
    python = Path(sysconfig.get_config_var("LIBDIR")) / str(sysconfig.get_config_var("INSTSONAME"))
    if not python.exists():
        pytest.skip("this Python has no shared library")
    return f"{python}:{attention_library()}"


def desktop(artifact: Artifact, tokens: Sequence[int], count: int, *, exact: bool) -> list[int]:
    """Return the greedy tokens of the Python engine."""
    engine = ExecutorchEngine(artifact.plan, artifact.folder, exact=exact)
    state, found, fed = engine.start(artifact.plan.storage), list[int](), list(tokens)
    while len(found) < count:
        for start in range(0, len(fed), 16):
            piece = fed[start : start + 16]
            rows = engine.forward([Chunk(state, piece, 1)])[0]
        found.append(int(rows[-1].argmax()))
        fed = found[-1:]
    engine.close()
    return found


def patient(artifact: Artifact, **changes: object) -> RunnerJob:
    """Return a job in which no disturbance counts, because machines that run tests are never idle."""
    question = job_of(artifact.folder, WORKLOAD, loads=2)
    return question.model_copy(update={"contended_share": 1e9, "throttled": 1e9, "cool_down_s": 0.0, **changes})


PROMPT = list(models.tokens_of(40))


@pytest.mark.parametrize("exact", [True, False], ids=["token by token", "in chunks"])
def test_runner_tokens_equal_the_desktops(runner: Runner, artifacts: dict[str, Artifact], exact: bool) -> None:
    """With ExecuTorch's own operators, so that the runner itself adds no arithmetic."""
    made = artifacts["qwen2"]
    found = runner.generate(made, PROMPT, 50, 1 if exact else 16, executorchs_operators())
    assert found == desktop(made, PROMPT, 50, exact=exact)


def test_runner_int8_cache_equals_the_desktops(runner: Runner, artifacts: dict[str, Artifact]) -> None:
    made = artifacts["narrow"]
    expected = desktop(made, PROMPT, 50, exact=True)
    assert runner.generate(made, PROMPT, 50, 1, executorchs_operators()) == expected
    assert runner.generate(made, PROMPT[:9], 1, 1, "") == desktop(made, PROMPT[:9], 1, exact=True)


def test_runner_attention_agrees_in_float(runner: Runner, artifacts: dict[str, Artifact]) -> None:
    """Causal and windowed layers in float, where rounding cannot flip near ties."""
    made = artifacts["gemma3"]
    assert runner.generate(made, PROMPT, 50, 16, "") == desktop(made, PROMPT, 50, exact=False)


def test_runner_reports_its_build(runner: Runner) -> None:
    assert runner.run("version").out.startswith(f"edgekit runner, executorch {version('executorch')}")
    assert runner.run("bogus").code == 2 and float(runner.run("read", 1).out) > 0.1


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_runner_returns_a_measurement(
    runner: Runner, artifacts: dict[str, Artifact], tmp_path: Path, family: str
) -> None:
    made = artifacts[family]
    question = patient(made)
    ran = runner.measure(made, question, tmp_path)
    assert ran.code == 0, ran.told
    found = check_answer(question, Measurement.model_validate_json(ran.out), "here")
    assert found.status == "valid" and found.workload_sha256 == WORKLOAD.sha256
    assert found.subject.artifact_sha256 == made.sha256
    assert found.subject.engine_version.startswith(f"executorch {version('executorch')}")
    turns, too_long = found.cases
    assert too_long.refused is not None and too_long.trials == ()
    assert turns.prompt_tokens == (20, 33) and [trial.repeat for trial in turns.trials] == [0, 1]
    assert [one.timed_tokens for one in turns.trials[0].requests] == [15, 33]
    assert [one.tokens for one in turns.trials[0].requests] == [6, 9]
    for trial in turns.trials:
        assert trial.total_s >= sum(one.prefill_s + one.decode_s for one in trial.requests) > 0
        assert trial.waited_share is not None
    for name, summary in Measurement.model_validate_json(ran.out).cases[0].summary.items():
        again = turns.summary[name]
        for field in ("median", "low", "high", "spread"):
            assert getattr(summary, field) == pytest.approx(getattr(again, field), rel=1e-6, abs=1e-9), (name, field)
    assert turns.roofline is not None and turns.roofline > 0 and turns.bytes_per_token
    assert len(found.load_s) == 2 and min(found.load_s) > 0
    memory = found.memory
    assert memory.peak_bytes and memory.rss_bytes and memory.rss_bytes <= memory.peak_bytes < 1 << 30
    assert found.conditions.cores >= 1 and found.conditions.ram_bytes and found.conditions.canary_s > 0
    assert any("runner's own kernels" in note for note in found.notes)


@pytest.mark.parametrize(
    ("rules", "kind"),
    [({"contended_share": -1.0}, "contended"), ({"throttled": 0.5}, "throttled")],
    ids=["a neighbour", "heat"],
)
def test_disturbed_trials_are_repeated_and_left_out_of_summaries(
    runner: Runner, artifacts: dict[str, Artifact], tmp_path: Path, rules: dict[str, float], kind: str
) -> None:
    question = patient(artifacts["qwen2"], **rules)
    ran = runner.measure(artifacts["qwen2"], question, tmp_path)
    found = check_answer(question, Measurement.model_validate_json(ran.out), "here")
    assert ran.code == 4 and found.status == kind and "two turns" in found.why
    assert [trial.attempt for trial in found.cases[0].trials] == [0, 1, 2, 0, 1, 2]
    assert found.cases[0].summary == {}


def test_answers_to_another_job_are_refused(runner: Runner, artifacts: dict[str, Artifact], tmp_path: Path) -> None:
    made, question = artifacts["qwen2"], patient(artifacts["qwen2"])
    copy = tmp_path / "copy"
    shutil.copytree(made.folder, copy)
    damaged = made._replace(folder=copy)
    data = bytearray((copy / PROGRAM).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / PROGRAM).write_bytes(data)
    assert "not those of its manifest" in runner.measure(damaged, question, tmp_path).told
    assert "was asked for" in runner.measure(artifacts["gemma3"], question, tmp_path).told
    long = question.model_copy(
        update={"cases": (question.cases[1].model_copy(update={"refused": None}),), "warmups": 0}
    )
    ran = runner.measure(made, long, tmp_path)
    assert ran.code == 2 and f"holds {SLOTS}" in ran.told and ran.out == ""


def test_no_job_crashes_the_runner(runner: Runner, artifacts: dict[str, Artifact], tmp_path: Path) -> None:
    whole, path = patient(artifacts["qwen2"]).model_dump(mode="json"), tmp_path / "question.json"
    text = json.dumps(whole)
    bad = [text[: len(text) * part // 7] for part in range(7)]
    bad += ["[" * 5000, "null", "[]", '{"version": 2}', text + "x", text.replace('"tokens": [', '"tokens": ["x", ', 1)]
    told_back = {"workload", "workload_sha256", "predicted"}  # whatever they are, they are for whoever asked
    bad += [json.dumps({**whole, name: value}) for name in whole.keys() - told_back for value in (None, "x")]
    for each in bad:
        path.write_text(each)
        ran = runner.run("measure", artifacts["qwen2"].folder, path)
        assert ran.code == 2 and ran.told.startswith("edgekit_runner: ") and ran.out == "", each[:200]


def test_a_phone_runs_the_runner_end_to_end(
    runner: Runner, artifacts: dict[str, Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    phone = Phone(tmp_path / "phone")
    phone.tell(abi={"x86_64": "x86_64", "aarch64": "arm64-v8a"}[platform.machine()])
    spec = DeviceSpec(
        name="pixel",
        kind="adb",
        profile="pixel-9",
        address=SERIAL,
        limits=DeviceLimits(cool_down_s=0.0),
        options={"runner": str(runner.path), "adb": str(phone.adb), "folder": str(phone.data / "lab"), "loads": 2},
    )
    workload = tmp_path / "small.yaml"
    workload.write_text(WORKLOAD.model_dump_json())
    device = connect(spec)
    with device.acquire(timeout_s=10):
        found = device.measure(artifacts["qwen2"].folder, workload, timeout_s=120)
    assert found.status in ("valid", "contended", "throttled")  # machines that run tests are never idle
    assert found.subject.artifact_sha256 == artifacts["qwen2"].sha256 and len(found.load_s) == 2
    assert found.conditions.machine.startswith("Google Pixel 9 (") and found.conditions.temperature_c == 36.5
    assert any("dumpsys meminfo counts" in note for note in found.notes)
    assert {len(trial.requests) for trial in found.cases[0].trials} == {2}
