"""What the tests of measuring share: fake artifacts whose target other processes find, and measurements made up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import runtimes
from click.testing import CliRunner

from edgekit.apps.bench.machine import Disturbance, Usage
from edgekit.apps.bench.measurement import (
    CaseResult,
    Conditions,
    Formats,
    Measurement,
    MemoryUse,
    Predicted,
    RequestTimes,
    SubjectInfo,
    Trial,
)
from edgekit.apps.bench.statistics import summaries
from edgekit.apps.bench.workload import Case, PromptText, Workload, WorkloadRequest
from edgekit.artifact.artifact import Artifact, open_artifact, seal
from edgekit.cli import command
from edgekit.common.staging import staging_for
from edgekit.contracts.manifest import MANIFEST
from edgekit.errors import EdgekitError
from edgekit.testing import fake_artifact, fake_model, fake_plan


def fake(folder: Path, *, seed: int = 0, context: int = 512, template: str = runtimes.TEMPLATE) -> Artifact:
    """A sealed artifact of the fake target, with a real tokenizer and a chat template."""
    tokenizer = runtimes.byte_level()
    model = fake_model(vocabulary=tokenizer.get_vocab_size(with_added_tokens=True))
    files: dict[str, Any] = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": {"bos_token": "<s>", "chat_template": template},
    }
    return fake_artifact(folder, files=files, plan=fake_plan(model, context=context), seed=seed)


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


def conditions(**known: Any) -> Conditions:
    figures: dict[str, Any] = {
        "measured_at": "2026-01-01T00:00:00Z", "machine": "a processor", "machine_key": "0" * 16, "os": "Linux 6",
        "cores": 2, "ram_bytes": 8 << 30, "load_average": 0.1, "power_source": "mains", "temperature_c": None,
        "frequency_mhz": None, "read_gb_s": 40.0, "fp32_tflops": 0.1, "versions": {"edgekit": "0.1.0"},
        "canary_s": 0.001,
    }  # fmt: skip
    return Conditions(**(figures | known))


def trial(decode: float, *, prefill: float = 1000.0, invalid: Any = None, tokens: int = 5) -> Trial:
    """A trial of 100 prompt tokens at these speeds."""
    gap = 1 / decode
    times = RequestTimes(
        prompt_tokens=100, timed_tokens=100, tokens=tokens, prefill_s=100 / prefill, first_token_s=100 / prefill,
        decode_s=gap * (tokens - 1), gaps_s=(gap,) * (tokens - 1),
    )  # fmt: skip
    return Trial(
        repeat=0, attempt=0, requests=(times,), total_s=0.1 + gap * tokens, canary_before=1.0, canary_after=1.0,
        waited_share=0.0, others_share=0.0, invalid=invalid,
    )  # fmt: skip


def measurement(
    speeds: Sequence[float], *, name: str = "onnx cpu s4-g64", invalid: Sequence[float] = (), **known: Any
) -> Measurement:
    """A measurement whose trials decode at these speeds."""
    trials = (*(trial(speed) for speed in speeds), *(trial(speed, invalid="contended") for speed in invalid))
    subject = SubjectInfo(
        name=name, engine="edgekit onnx cpu", engine_version="0.1.0", model="demo", recipe="s4-g64",
        formats=Formats(
            linears="4-bit symmetric, groups of 64, bf16 scales", embedding="8-bit", head="8-bit, tied",
            bits_per_weight=5.0, file_bytes=4 << 20, same_integers=True,
        ),
        artifact_sha256="a" * 64, weights_sha256="b" * 64, device="this", threads=2, context=2048, kv_bits=32,
    )  # fmt: skip
    case = CaseResult(
        case="128 in, 32 out", prompt_tokens=(100,), trials=trials, summary=summaries(trials), roofline=0.7,
        bytes_per_token=1 << 20,
    )  # fmt: skip
    figures: dict[str, Any] = {
        "status": "valid", "subject": subject,
        "workload": "quick", "workload_sha256": "c" * 64, "conditions": conditions(),
        "load_s": (0.5, 0.4, 0.4), "cases": (case,),
        "memory": MemoryUse(peak_bytes=110 << 20, peak_counter="VmHWM of /proc/PID/status", anonymous_bytes=40 << 20),
        "predicted": Predicted(
            total_bytes=120 << 20, private_bytes=100 << 20, decode_tokens_per_s=900.0, prefill_tokens_per_s=None,
            first_token_s=None, basis="a test",
        ),
    }  # fmt: skip
    return Measurement(**(figures | known))


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
