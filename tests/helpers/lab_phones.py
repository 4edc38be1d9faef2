"""Phones without phones: artifacts as they go there, devices over a `Phone`, and a runner that says what it is told."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import runtimes
from fake_adb import SERIAL, Phone
from measured import conditions

from edgekit.apps.bench.measurement import CaseResult, Measurement, MemoryUse, RequestTimes, Trial
from edgekit.apps.bench.statistics import summaries
from edgekit.apps.lab.adb import AdbDevice
from edgekit.apps.lab.devices import DeviceLimits, DeviceSpec, connect
from edgekit.apps.lab.runner_job import RunnerJob
from edgekit.artifact.artifact import Artifact
from edgekit.testing import fake_artifact, fake_model, fake_plan

ABI = {"x86_64": "x86_64", "aarch64": "arm64-v8a"}.get(platform.machine(), "x86_64")
# What the native runner is in these tests: this Python, which runs the file `measure` of the phone's folder.
STAND_IN = """import os, signal, sys, time
folder, question, _, meminfo = sys.argv[1:5]
{before}
os.system(f"dumpsys meminfo {{os.getpid()}} > {{meminfo}}")
sys.stderr.write("I executorch: a line of a log\\n")
sys.stdout.write(open("answer.json").read())
"""


def program(folder: Path, **changes: Any) -> Artifact:
    """What an artifact of the executorch target looks like from outside."""
    tokenizer = runtimes.byte_level()
    plan = fake_plan(fake_model(vocabulary=tokenizer.get_vocab_size(with_added_tokens=True)), context=512)
    plan = plan.model_copy(update={"target": "executorch", "backend": "xnnpack", "device": "pixel-9", **changes})
    return fake_artifact(folder, files={"tokenizer.json": tokenizer.to_str(), "model.pte": os.urandom(5000)}, plan=plan)


def spec_of(phone: Phone, **known: Any) -> DeviceSpec:
    options = {"runner": os.path.realpath(sys.executable), "adb": str(phone.adb), "loads": 1}
    options = {**options, "folder": str(phone.data / "lab"), **known.pop("options", {})}
    limits = known.pop("limits", DeviceLimits(cool_down_s=0.0))
    figures = {"name": "pixel", "kind": "adb", "profile": "pixel-9", "address": SERIAL, **known}
    return DeviceSpec(**figures, limits=limits, options=options, environment={"PYTHONHOME": sys.base_prefix})


def device_of(phone: Phone, **known: Any) -> AdbDevice:
    device = connect(spec_of(phone, **known))
    assert isinstance(device, AdbDevice)
    device.poll_s = 0.01
    return device


def answer_to(question: RunnerJob, *, decode: float = 100.0, status: str = "valid") -> Measurement:
    """A made-up answer that fits the question."""
    invalid: Any = None if status == "valid" else status
    cases = []
    for case in question.cases:
        times = tuple(
            RequestTimes(
                prompt_tokens=prompt, timed_tokens=prompt - one.depth, tokens=one.outputs, prefill_s=0.1,
                first_token_s=0.1, decode_s=(one.outputs - 1) / decode, gaps_s=(1 / decode,) * (one.outputs - 1),
            )
            for prompt, one in zip(case.prompt_tokens, case.requests, strict=True)
        )  # fmt: skip
        trials = tuple(
            Trial(repeat=repeat, attempt=0, requests=times, total_s=1.0 + repeat / 1000, canary_before=1.0,
                  canary_after=1.0, waited_share=0.0, others_share=None, invalid=invalid)
            for repeat in range(question.repeats)
        )  # fmt: skip
        cases.append(
            CaseResult(case=case.case, prompt_tokens=case.prompt_tokens, depth_tokens=case.depth_tokens, trials=trials,
                       summary=summaries(trials), bytes_per_token=case.bytes_per_token)
        )  # fmt: skip
    return Measurement(
        status=status, subject=question.subject.model_copy(update={"engine_version": "executorch 1.5.1", "threads": 4}),  # type: ignore[arg-type]
        workload=question.workload, workload_sha256=question.workload_sha256, load_s=(0.5,),
        conditions=conditions(power_source=None, temperature_c=None, not_told=("power source", "temperature")),
        memory=MemoryUse(peak_bytes=50 << 20, peak_counter="VmHWM of /proc/PID/status"),
        predicted=question.predicted, cases=tuple(cases),
    )  # fmt: skip


def answering(phone: Phone, question: RunnerJob, before: str = "", change: Callable[[Any], None] | None = None) -> None:
    """From now on the runner does `before` and gives the answer to that question, as `change` leaves it."""
    found = answer_to(question).model_dump(mode="json")
    if change is not None:
        change(found)
    (phone.data / "answer.json").write_text(json.dumps(found))
    (phone.data / "measure").write_text(STAND_IN.format(before=before))
