"""Phones behind a fake adb: transfers, commands and faults."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runtimes
from fake_adb import BATTERY, SERIAL, THERMAL, Phone
from hypothesis import given, settings, strategies as st
from measured import conditions, invoked

from edgekit.apps.bench.measurement import CaseResult, Measurement, MemoryUse, RequestTimes, Trial
from edgekit.apps.bench.statistics import summaries
from edgekit.apps.bench.workload import read_workload
from edgekit.apps.lab.adb import AdbDevice
from edgekit.apps.lab.devices import DeviceLimits, DeviceSpec, connect, read_measurement
from edgekit.apps.lab.phone_state import ASKED, meminfo_bytes, phone_state
from edgekit.apps.lab.runner_job import RunnerJob, check_answer, job_of
from edgekit.artifact.artifact import Artifact, open_artifact
from edgekit.contracts.manifest import MANIFEST
from edgekit.errors import (
    DeviceFailed,
    DeviceTimeout,
    DeviceUnreachable,
    EdgekitError,
    InvalidInput,
    Unsupported,
    WorkloadFailed,
)
from edgekit.testing import fake_artifact, fake_model, fake_plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in for a phone is a Linux folder")


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


def answer_to(question: RunnerJob) -> Measurement:
    """A made-up answer that fits the question."""
    cases = []
    for case in question.cases:
        times = tuple(
            RequestTimes(
                prompt_tokens=prompt, timed_tokens=prompt - one.depth, tokens=one.outputs, prefill_s=0.1,
                first_token_s=0.1, decode_s=(one.outputs - 1) / 100, gaps_s=(0.01,) * (one.outputs - 1),
            )
            for prompt, one in zip(case.prompt_tokens, case.requests, strict=True)
        )  # fmt: skip
        trials = tuple(
            Trial(repeat=repeat, attempt=0, requests=times, total_s=1.0 + repeat / 1000, canary_before=1.0,
                  canary_after=1.0, waited_share=0.0, others_share=None, invalid=None)
            for repeat in range(question.repeats)
        )  # fmt: skip
        cases.append(
            CaseResult(case=case.case, prompt_tokens=case.prompt_tokens, depth_tokens=case.depth_tokens, trials=trials,
                       summary=summaries(trials), bytes_per_token=case.bytes_per_token)
        )  # fmt: skip
    subject = question.subject.model_copy(update={"engine_version": "executorch 1.5.1", "threads": 4})
    return Measurement(
        status="valid", subject=subject, workload=question.workload, workload_sha256=question.workload_sha256,
        load_s=(0.5,),
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


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return program(tmp_path / "phone.edgekit")


@pytest.fixture
def phone(tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> Phone:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))  # where leases stand, which other tests have too
    found = Phone(tmp_path / "phone")
    found.tell(abi=ABI)
    answering(found, job_of(artifact.folder, read_workload("quick"), loads=1))
    return found


def measured(device: AdbDevice, artifact: Artifact, timeout_s: float = 300.0) -> Measurement:
    with device.acquire(timeout_s=30):
        return device.measure(artifact.folder, Path("quick"), timeout_s=timeout_s)


@pytest.mark.parametrize("old", [False, True], ids=["a new phone", "an old phone"])
def test_a_measurement_includes_the_phones_state(phone: Phone, artifact: Artifact, old: bool) -> None:
    phone.set(old=old)
    found = measured(device_of(phone), artifact)
    assert found.status == "valid" and found.subject.artifact_sha256 == artifact.sha256
    around = found.conditions
    assert around.machine == "Google Pixel 9 (a processor)" and around.os == "Android 16 API 36 build BP1A, Linux 6"
    assert (around.power_source, around.temperature_c, around.not_told) == ("mains", 36.5, ())
    assert found.memory.peak_bytes == 50 << 20 and found.memory.pss_bytes == 34567 << 10
    assert "battery 85 %, charging, thermal status none, screen awake" in found.notes[0]


def test_files_are_sent_once_and_nothing_else_is_left(phone: Phone, artifact: Artifact) -> None:
    device = device_of(phone)
    measured(device, artifact)
    first = phone.pushed()
    assert [re.sub(r"runner-\w+", "runner", name) for name in first] == [
        "runner.part", "model.pte.part", f"{MANIFEST}.part", "question.json.part",
    ]  # fmt: skip
    measured(device, artifact)
    assert phone.pushed()[len(first) :] == ["question.json.part"]
    folder = phone.data / "lab"
    assert {path.name for path in folder.iterdir()} == {first[0].removesuffix(".part"), artifact.sha256}
    assert (folder / artifact.sha256 / "model.pte").read_bytes() == (artifact.folder / "model.pte").read_bytes()


def test_the_screen_stays_on_during_the_lease_and_is_then_restored(phone: Phone) -> None:
    phone.tell(stay_on_while_plugged_in="3\n", screen="Asleep\n")
    with device_of(phone).acquire(timeout_s=30):
        assert (phone.state / "stay_on_while_plugged_in").read_text() == "7\n"
        assert (phone.state / "screen").read_text() == "Awake\n"
    assert (phone.state / "stay_on_while_plugged_in").read_text() == "3\n"


@pytest.mark.parametrize(
    ("state", "said"), [("gone", "not found"), ("offline", "device offline"), ("unauthorized", "confirmation dialog")]
)
def test_a_phone_that_cannot_be_used_is_unreachable(phone: Phone, artifact: Artifact, state: str, said: str) -> None:
    phone.set(**{"is": state})
    device = device_of(phone)
    with pytest.raises(DeviceUnreachable, match=said):
        device.ping(timeout_s=300)
    with pytest.raises(DeviceUnreachable, match=said):
        device.measure(artifact.folder, Path("quick"), timeout_s=5)


def test_ping_describes_the_phone(phone: Phone) -> None:
    who = f"Google Pixel 9, Android 16 API 36 build BP1A, {ABI}"
    now = "battery 85 %, charging, thermal status none, screen awake"
    assert device_of(phone).ping(timeout_s=300) == f"{who}, {now}"


def test_a_hanging_adb_times_out(phone: Phone) -> None:
    phone.set(slow_s=30.0)
    with pytest.raises(DeviceTimeout, match="longer than"):
        device_of(phone).ping(timeout_s=0.3)


def test_missing_adb_is_reported(phone: Phone) -> None:
    with pytest.raises(DeviceUnreachable, match="cannot be started"):
        device_of(phone, options={"adb": "no-such-adb"}).ping(timeout_s=300)


FAULTS: dict[str, tuple[dict[str, Any], type[DeviceFailed], str]] = {
    "full disk": ({"full": True}, DeviceFailed, "disk is full"),
    "damaged on the way": ({"damages": True}, DeviceUnreachable, "arrived damaged"),
    "cut while sending": ({"cut": "model.pte"}, DeviceUnreachable, "adb lost"),
    "cut while measuring": ({"cut": "timeout -k"}, DeviceUnreachable, "adb lost"),
    "cut while measuring, old": ({"cut": "timeout -k", "old": True}, DeviceUnreachable, "adb lost"),
    "cut without a word": ({"cut": "timeout -k", "silent": True}, DeviceUnreachable, "adb lost"),
}


@pytest.mark.parametrize(("behaviour", "error", "said"), FAULTS.values(), ids=FAULTS)
def test_broken_transfers_are_reported_and_repeated(
    phone: Phone, artifact: Artifact, behaviour: dict[str, Any], error: type[DeviceFailed], said: str
) -> None:
    device = device_of(phone)
    phone.set(**behaviour)
    with pytest.raises(error, match=said):
        device.measure(artifact.folder, Path("quick"), timeout_s=300)
    if behaviour.get("full") or behaviour.get("damages"):
        assert not list(phone.data.rglob("*.part"))
    phone.set()
    assert measured(device, artifact).status == "valid"


ENDINGS: dict[str, tuple[str, type[EdgekitError], str]] = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", DeviceUnreachable, "ended on the phone"),
    "too slow": ("time.sleep(600)", DeviceUnreachable, "ended on the phone"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", DeviceUnreachable, "ended on the phone"),
    "refused": ("sys.exit('edgekit_runner: no such operator')", WorkloadFailed, "no such operator"),
    "crashed": ("os.kill(os.getpid(), signal.SIGSEGV)", WorkloadFailed, "exit code"),
    "no answer": ("sys.exit(0)", WorkloadFailed, "0 lines"),
    "no measurement": ("sys.exit(print('{}'))", WorkloadFailed, "no measurement"),
    "two lines": ("print('x')", WorkloadFailed, "2 lines"),
}


@pytest.mark.parametrize(("before", "error", "said"), ENDINGS.values(), ids=ENDINGS)
def test_every_exit_of_the_runner_is_reported(
    phone: Phone, artifact: Artifact, before: str, error: type[EdgekitError], said: str
) -> None:
    answering(phone, job_of(artifact.folder, read_workload("quick"), loads=1), before)
    with pytest.raises(error, match=said):
        device_of(phone).measure(
            artifact.folder, Path("quick"), timeout_s=1.0 if said == "ended on the phone" else 300.0
        )
    assert not list(phone.data.rglob("asked-*"))


def _another(path: str, value: Any) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        *way, last = path.split(".")
        for name in way:
            found = found[int(name) if name.isdigit() else name]
        found[int(last) if last.isdigit() else last] = value

    return change


LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "artifact": (_another("arm.artifact_sha256", "f" * 64), "another artifact"),
    "workload": (_another("workload_sha256", "f" * 64), "another workload"),
    "subject": (_another("arm.recipe", "another"), "another subject"),
    "cases": (_another("cases.0.case", "other"), "other cases"),
    "prompt": (_another("cases.0.prompt_tokens", [1]), "another question"),
    "size of a trial": (_another("cases.0.trials.0.requests.0.tokens", 3), "other sizes"),
    "summary": (_another("cases.0.summary.decode_tokens_per_s.median", 1e6), "decode_tokens_per_s"),
    "no trial": (_another("cases.0.trials", []), "not that of its own trials"),
    "a number": (_another("load_s", ["fast"]), "no measurement"),
    "another field": (_another("surprise", 1), "no measurement"),
}


@pytest.mark.parametrize(("change", "said"), LIES.values(), ids=LIES)
def test_an_answer_to_another_job_is_refused(artifact: Artifact, change: Callable[[Any], None], said: str) -> None:
    question = job_of(artifact.folder, read_workload("quick"))
    found = answer_to(question).model_dump(mode="json")

    def read() -> Measurement:
        asked = {"artifact_sha256": question.artifact_sha256, "workload_sha256": question.workload_sha256}
        return check_answer(question, read_measurement(json.dumps(found).encode(), who="pixel", **asked), "pixel")

    assert read().status == "valid"
    change(found)
    with pytest.raises(WorkloadFailed, match=said):
        read()


def test_a_false_answer_is_detected(phone: Phone, artifact: Artifact) -> None:
    question = job_of(artifact.folder, read_workload("quick"), loads=1)
    answering(phone, question, change=LIES["summary"][0])
    with pytest.raises(WorkloadFailed, match="not that of its own trials"):
        device_of(phone).measure(artifact.folder, Path("quick"), timeout_s=300)


def test_an_endless_answer_is_not_read(phone: Phone, artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit.apps.lab.adb.MAX_ANSWER_BYTES", 1000)
    with pytest.raises(WorkloadFailed, match="at most 1,000 are read"):
        device_of(phone).measure(artifact.folder, Path("quick"), timeout_s=300)
    assert phone.calls("pull") == []


def test_a_hot_phone_is_let_cool_first(phone: Phone, artifact: Artifact) -> None:
    phone.tell(thermal="3\n2\n0\n0\n")
    device = device_of(phone, limits=DeviceLimits(cool_down_s=60.0))
    assert device.measure(artifact.folder, Path("quick"), timeout_s=300).status == "valid"


def test_a_phone_that_stays_hot_is_tried_later(phone: Phone, artifact: Artifact) -> None:
    phone.tell(thermal="2\n")
    device = device_of(phone, limits=DeviceLimits(cool_down_s=0.05))
    with pytest.raises(DeviceUnreachable, match="moderate"):
        device.measure(artifact.folder, Path("quick"), timeout_s=300)
    assert phone.pushed() == []


@pytest.mark.parametrize(
    ("told", "status", "why"),
    [({"thermal": "1\\n"}, "throttled", "light"), ({"screen": "Dozing\\n"}, "contended", "Dozing")],
    ids=["it became hot", "its screen went out"],
)
def test_a_change_of_phone_state_marks_the_measurement_as_disturbed(
    phone: Phone, artifact: Artifact, told: dict[str, str], status: str, why: str
) -> None:
    name, text = next(iter(told.items()))
    question = job_of(artifact.folder, read_workload("quick"), loads=1)
    answering(phone, question, f"open({str(phone.state / name)!r}, 'w').write('{text}')")
    found = device_of(phone).measure(artifact.folder, Path("quick"), timeout_s=300)
    assert found.status == status and why in found.why


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"battery": BATTERY.replace("85", "12").replace("USB powered: true", "USB powered: false")}, "12 %"),
        ({"low_power": "1\n"}, "battery saver"),
        ({"screen": "Asleep\n", "stuck": ""}, "wake it"),
    ],
    ids=["empty battery", "battery saver", "a screen that stays off"],
)
def test_an_unfit_phone_is_refused(phone: Phone, artifact: Artifact, told: dict[str, str], said: str) -> None:
    phone.tell(**told)
    with pytest.raises(DeviceUnreachable, match=said):
        device_of(phone).measure(artifact.folder, Path("quick"), timeout_s=300)
    assert phone.pushed() == []


def test_a_runner_left_by_a_killed_lab_is_ended_first(phone: Phone, artifact: Artifact) -> None:
    device = device_of(phone)
    question = job_of(artifact.folder, read_workload("quick"), loads=1)
    answering(phone, question, "time.sleep(300)")
    phone.set(cut="timeout -k", cut_after="lab/running")
    with pytest.raises(DeviceUnreachable):
        device.measure(artifact.folder, Path("quick"), timeout_s=300)
    process = int((phone.data / "lab" / "running").read_text())
    (phone.data / "lab" / "asked-0").mkdir()
    assert b"runner-" in Path(f"/proc/{process}/cmdline").read_bytes()
    phone.set()
    answering(phone, question)
    device.measure(artifact.folder, Path("quick"), timeout_s=300)
    path = Path(f"/proc/{process}/stat")
    assert not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z"
    assert not list(phone.data.rglob("asked-*"))


def test_a_runner_gets_no_more_memory_than_the_limit(phone: Phone, artifact: Artifact) -> None:
    question = job_of(artifact.folder, read_workload("quick"), loads=1)
    answering(phone, question, "x = bytearray(400 << 20)")
    device = device_of(phone)
    assert device.measure(artifact.folder, Path("quick"), timeout_s=300).status == "valid"
    limited = device_of(phone, limits=DeviceLimits(cool_down_s=0.0, memory_bytes=200 << 20))
    with pytest.raises(WorkloadFailed, match="MemoryError"):
        limited.measure(artifact.folder, Path("quick"), timeout_s=300)


def test_stop_ends_a_waiting_call(phone: Phone, artifact: Artifact) -> None:
    device = device_of(phone)
    answering(phone, job_of(artifact.folder, read_workload("quick"), loads=1), "time.sleep(300)")

    def stop() -> None:
        while not (phone.data / "lab" / "running").exists():
            time.sleep(0.05)
        device.stop()

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(DeviceUnreachable), device.acquire(timeout_s=30):
        device.measure(artifact.folder, Path("quick"), timeout_s=300)
    assert (phone.state / "stay_on_while_plugged_in").read_text() == "0\n"
    assert not (phone.data / "lab" / "running").exists()


@pytest.mark.parametrize(
    "known",
    [
        {"address": None},
        {"address": "phone;reboot"},
        {"address": "R5 CT"},
        {"profile": "this"},
        {"options": {"folder": "relative"}},
        {"options": {"folder": "/data/../system"}},
        {"options": {"folder": "/data/$(reboot)"}},
        {"options": {"runner": "/no/such/runner"}},
        {"options": {"min_battery": "20"}},
        {"options": {"serial": "x"}},
    ],
    ids=str,
)
def test_names_that_could_be_commands_are_refused(phone: Phone, known: dict[str, Any]) -> None:
    with pytest.raises((InvalidInput, ValueError)):
        device_of(phone, **known)


def test_a_runner_for_another_processor_is_refused(phone: Phone, artifact: Artifact) -> None:
    phone.tell(abi="armeabi-v7a\n")
    with pytest.raises(InvalidInput, match="not a program for armeabi-v7a"):
        device_of(phone).measure(artifact.folder, Path("quick"), timeout_s=300)


@pytest.mark.parametrize("changes", [{"target": "onnx", "backend": "cpu"}, {"backend": "coreml"}], ids=str)
def test_an_artifact_that_no_runner_runs_is_refused(phone: Phone, tmp_path: Path, changes: dict[str, Any]) -> None:
    other = program(tmp_path / "other", **changes)
    with pytest.raises(Unsupported, match="no native runner"):
        device_of(phone).measure(other.folder, Path("quick"), timeout_s=300)


def test_a_lab_of_a_phone_is_checked_planned_and_run(phone: Phone, artifact: Artifact, tmp_path: Path) -> None:
    spec = spec_of(phone)
    lines = [f"    {name}: {json.dumps(value)}" for name, value in {**spec.options, "runner": "the-runner"}.items()]
    (tmp_path / "the-runner").write_bytes(Path(os.path.realpath(sys.executable)).read_bytes())
    file = tmp_path / "lab.yaml"
    file.write_text(
        f"version: 1\nname: phones\nartifacts: [{artifact.folder.name}]\nworkloads: [quick]\ndevices:\n- name: pixel\n"
        f"  kind: adb\n  address: {SERIAL}\n  profile: pixel-9\n  limits: {{cool_down_s: 0}}\n"
        f"  environment: {{PYTHONHOME: {json.dumps(sys.base_prefix)}}}\n  options:\n" + "\n".join(lines) + "\n"
    )
    there = invoked(["lab", "check", str(file)])
    assert there.code == 0 and "Google Pixel 9" in there.output
    planned = invoked(["lab", "plan", str(file)])
    assert "pixel" in planned.output and "quick" in planned.output
    ran = invoked(["lab", "run", str(file), "--store", str(tmp_path / "lab.sqlite"), "--json"])
    assert ran.code == 0
    found = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))
    assert found["state"] == "done" and found["measurement"]["conditions"]["machine"].startswith("Google Pixel 9")


def test_a_runner_job_has_the_workloads_tokens_and_names_refused_cases(artifact: Artifact, tmp_path: Path) -> None:
    asked = job_of(artifact.folder, read_workload("chat"))
    turns = asked.cases[0]
    assert [len(one.tokens) for one in turns.requests] == [96, 32, 48, 24]
    assert turns.prompt_tokens == (96, 96 + 64 + 32, 192 + 64 + 48, 304 + 64 + 24) and turns.refused is None
    assert asked.artifact_sha256 == open_artifact(artifact.folder).sha256
    assert RunnerJob.model_validate_json(asked.model_dump_json()) == asked
    long = job_of(artifact.folder, read_workload("summarise")).cases[0]
    assert long.refused is not None and "--context" in long.refused
    windowed = read_workload("quick").model_copy(update={"window": 100, "sinks": 4})
    assert "drops none" in str(job_of(artifact.folder, windowed).cases[0].refused)


def test_a_runner_job_is_written_for_a_manual_run(artifact: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "question.json"
    options = ["--repeats", "2", "--loads", "1", "--exact"]
    assert invoked(["lab", "question", str(artifact.folder), "-w", "quick", *options, "-o", str(path)]).code == 0
    asked = read_workload("quick").model_copy(update={"repeats": 2})
    assert RunnerJob.model_validate_json(path.read_text()) == job_of(artifact.folder, asked, loads=1, exact=True)
    printed = invoked(["lab", "question", str(artifact.folder)]).stdout
    assert RunnerJob.model_validate_json(printed) == job_of(artifact.folder, read_workload("quick"))


def test_android_service_output_is_parsed() -> None:
    told = {
        "battery": BATTERY,
        "thermal": THERMAL.format(status=2),
        "screen": "  mWakefulness=Dozing\n",
        "model": "P\n",
    }
    found = phone_state({**told, "saver": "1\n", "awake": "null\n", "abi": "arm64-v8a"})
    assert (found.battery_percent, found.is_charging, found.is_plugged) == (85, True, True)
    assert (found.thermal, found.thermal_words, found.temperature_c) == (2, "moderate", 36.5)
    assert (found.is_awake, found.is_saving_power, found.stays_on) == (False, True, None)
    nothing = phone_state({})
    assert (nothing.battery_percent, nothing.thermal, nothing.is_awake, nothing.temperature_c) == (None,) * 4
    assert str(nothing) == "a phone, Android, , battery not told, thermal status not told, screen not told"
    assert meminfo_bytes("  TOTAL    1,0\n") is None and meminfo_bytes(" TOTAL PSS:   12 TOTAL RSS: 3") == 12 << 10


@given(st.dictionaries(st.sampled_from(sorted(ASKED)), st.text(max_size=400)), st.text(max_size=400))
@settings(deadline=None, max_examples=60)
def test_unreadable_output_of_services_is_left_out(told: dict[str, str], meminfo: str) -> None:
    found = str(phone_state(told))
    assert "\n" not in found and len(found) < 2000
    assert meminfo_bytes(meminfo) is None or meminfo_bytes(meminfo) >= 0  # type: ignore[operator]
