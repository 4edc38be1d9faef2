"""`edgekit lab`: its file, commands and reports, and this machine as a device."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import fake_artifacts
import pytest
import yaml
from click.testing import CliRunner, Result
from lab_fakes import QUICK, FakeDevice, begun, fakes, lab_of
from measured import fake

from edgekit.apps.bench.artifact_subjects import predicted_s
from edgekit.apps.bench.measurement import MemoryUse
from edgekit.apps.bench.report.markdown import markdown
from edgekit.apps.bench.report.page import page
from edgekit.apps.bench.workload import read_workload
from edgekit.apps.lab import devices as kinds
from edgekit.apps.lab.devices import DeviceLimits, DeviceSpec, connect, read_measurement
from edgekit.apps.lab.local import LocalDevice
from edgekit.apps.lab.matrix import read_lab
from edgekit.apps.lab.report import exit_code, junit, report_of, rows_of
from edgekit.apps.lab.run import run_lab
from edgekit.apps.lab.store import LabStore
from edgekit.artifact.artifact import open_artifact
from edgekit.cli import command
from edgekit.contracts.token_costs import touched_weight_bytes
from edgekit.device.load import load_profile
from edgekit.errors import DeviceFailed, DeviceTimeout, DeviceUnreachable, EdgekitError, InvalidInput, WorkloadFailed
from edgekit.planner.speed import predict
from edgekit.runtime.memory.report import MemoryClass
from edgekit.testing import FakeTarget

LAB = """
version: 1
name: nightly
devices:
  - name: first
    kind: fake
    profile: raspberry-pi-5-8gb
    limits: {cool_down_s: 0.0}
  - name: second
    kind: fake
    profile: pixel-9
artifacts: [one, two]
workloads: [quick]
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(kinds.BUILT_IN, "fake", "lab_fakes:FakeDevice")
    for seed, name in enumerate(("one", "two")):
        fake(tmp_path / name, seed=seed)
    path = tmp_path / "lab.yaml"
    path.write_text(LAB)
    return path


def lab_command(*arguments: object) -> Result:
    return CliRunner().invoke(command, ["lab", *map(str, arguments)], standalone_mode=False)


def test_a_lab_is_checked_planned_run_and_kept(lab: Path, tmp_path: Path) -> None:
    checked = lab_command("check", lab)
    assert checked.return_value == 0 and checked.output.count("here") == 2
    planned = lab_command("plan", lab)
    assert (
        planned.output.count("quick") == 4
        and "memory" in planned.output
        and "second: 37 min predicted" in planned.output
    )
    (entry, *_) = map(json.loads, lab_command("plan", lab, "--json").output.splitlines())
    assert entry["predicted_s"] > 0 and entry["timeout_s"] == pytest.approx(300 + 6 * entry["predicted_s"])
    html, junit_file = tmp_path / "lab.html", tmp_path / "lab.xml"
    done = lab_command("run", lab, "-o", html, "-o", junit_file)
    assert done.return_value == 0, done.output
    assert "4 cells: 4 ok" in done.stdout and "first: done" in done.stderr
    assert "<html" in html.read_text() and ElementTree.parse(junit_file).getroot().get("tests") == "4"
    (line,) = lab_command("history", "--json").output.splitlines()
    kept = json.loads(line)
    assert kept["lab"] == "nightly" and kept["states"] == {"done": 4}
    again = lab_command("history", kept["id"], "--json").output.splitlines()
    assert [json.loads(one)["verdict"] for one in again] == ["ok"] * 4
    resumed = lab_command("run", lab, "--resume", "last", "--json")
    assert [json.loads(one)["cell"]["id"] for one in resumed.stdout.splitlines()] == [
        json.loads(one)["cell"]["id"] for one in again
    ]
    assert lab_command("history", "--json").output.count("\n") == 1


def test_a_regression_fails_the_build(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lab_command("run", lab).return_value == 0
    first = json.loads(lab_command("history", "--json").output)["id"]
    lab.write_text(with_baseline := LAB + f"baseline: {first}\n")
    usual = FakeDevice.usual
    monkeypatch.setattr(FakeDevice, "usual", lambda self, *given, **known: usual(self, *given, speed=70.0, **known))
    worse = lab_command("run", lab)
    assert worse.return_value == 5 and "▼-30.0%" in worse.stdout and "4 worse" in worse.stdout
    second = json.loads(lab_command("history", "--json").output.splitlines()[0])["id"]
    compared = lab_command("compare", first, second)
    assert compared.return_value == 5 and "decode_tokens_per_s worse -30.0%" in compared.output
    assert lab_command("compare", second, first).return_value == 0
    lab.write_text(with_baseline + "thresholds: [{metric: decode_tokens_per_s, worse_by: 0.4}]\n")
    assert lab_command("run", lab).return_value == 0


def test_a_new_export_is_compared_with_the_earlier_one(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = ("0123456789abcdef", "fedcba9876543210")
    names = [[f"{model}-{plan}" for model in ("a-onnx-s4", "a-onnx-s8")] for plan in plans]
    for each in names:
        for seed, name in enumerate(each):
            fake(lab.parent / name, seed=seed)
    usual, found = FakeDevice.usual, []
    for each, speed in zip(names, (100.0, 70.0), strict=True):
        lab.write_text(LAB.replace("one, two", ", ".join(each)))
        answer = lambda self, *given, speed=speed, **known: usual(self, *given, speed=speed, **known)  # noqa: E731
        monkeypatch.setattr(FakeDevice, "usual", answer)
        lab_command("run", lab)
        found.append(json.loads(lab_command("history", "--json").output.splitlines()[0])["id"])
    told = lab_command("compare", *found)
    assert told.return_value == 5 and told.output.count("decode_tokens_per_s worse -30.0%") == 4
    assert "a-onnx-s8-fedcba9876543210 #0, quick" in told.output


def test_what_a_run_measured_is_shared_and_comes_back_as_a_profile(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = open_artifact(lab.parent / "one").plan
    model = plan.estimate.private_weights_bytes + plan.memory.tokenizer(plan.model)[0]
    classes = (MemoryClass(name="runtime and private weights", predicted_bytes=1, measured_bytes=model + (5 << 20)),)
    memory, usual = MemoryUse(peak_bytes=1 << 30, peak_counter="a test", classes=classes), FakeDevice.usual
    monkeypatch.setattr(FakeDevice, "usual", lambda self, *given, **known: usual(self, *given, memory=memory, **known))
    assert lab_command("run", lab).return_value == 0
    for name in ("one", "two"):
        shutil.rmtree(lab.parent / name)  # the store keeps the plan
    run = json.loads(lab_command("history", "--json").output)["id"]
    assert "4 measurements" in lab_command("share", run, lab.parent / "shared.json").output
    told = CliRunner().invoke(command, ["devices", "calibrate", str(lab.parent / "shared.json")]).output
    assert "raspberry-pi-5-8gb: fake.cpu bandwidth" in told and "the target's → 5 MiB" in told
    profile = load_profile("raspberry-pi-5-8gb")
    figures = profile.engines["fake.cpu"]
    assert figures.bandwidth_gb_s is not None
    assert figures.bandwidth_gb_s.value == pytest.approx(100 * (1 << 20) / 1e9, abs=0.01)
    assert figures.bandwidth_gb_s.source == "measured: shared" and figures.spread == (0.9, 1.1)
    text = (lab.parent / "shared.json").read_text()
    shared = json.loads(text)["measurements"][0]
    assert (shared["device"], shared["engine"], shared["layers"]) == ("raspberry-pi-5-8gb", "fake.cpu", 2)
    assert len(text) < 8000
    assert not any(
        private in text for private in ("/", '"one"', os.uname().nodename, "nightly", '"first"', "a machine")
    )
    # The next plan gives what was measured, within the range that it says.
    board = profile.model_copy(update={"targets": {"fake": ("cpu",)}})
    offer = next(iter(FakeTarget().offers(plan.model, board)))
    read = shared["cases"][0]["step_bytes"] / touched_weight_bytes(plan.model, offer.recipe, offer.memory)
    speed = predict(plan.model, offer, board, read_tokens=0, prompt_tokens=1, kv_bits=16)
    assert speed.decode.expected / read == pytest.approx(100, rel=0.02)
    assert speed.origin == "measured on this device with this engine"


@pytest.mark.parametrize(
    ("change", "said"),
    {
        "an unknown key": (("repeats: 1", "repeat: 1"), "repeat"),
        "a misspelt key of the lab": (("devices:", "others:"), "others"),
        "a device twice": (("name: second", "name: first"), "same name"),
        "nothing to measure": (("artifacts: [one, two]", ""), "nothing to measure"),
        "a name with a path": (("name: first", "name: ../first"), "name"),
        "an address that is an option": (("profile: pixel-9", 'address: "-oProxyCommand=x"'), "address"),
        "no artifact there": (("[one, two]", "[three]"), "three"),
        "an unknown workload": (("[quick]", "[quack]"), "quack"),
        "an unknown kind": (("kind: fake", "kind: cloud"), "cloud"),
        "an unknown baseline": (("repeats: 1", "baseline: 20260101-000000-000000"), "20260101-000000-000000"),
        "a newer version": (("version: 1", "version: 2"), "version"),
    }.items(),
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_a_lab_file_is_read_strictly(lab: Path, change: str, said: tuple[tuple[str, str], str]) -> None:
    (old, new), word = said
    lab.write_text((LAB + "repeats: 1\n").replace(old, new))
    found = lab_command("run", lab)
    assert isinstance(found.exception, EdgekitError), found.output
    assert word in str(found.exception) and "\n" not in str(found.exception)


def test_text_from_devices_is_escaped_in_reports(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>|`x`\x1b[31m\x00&amp;"
    lab = lab_of(tmp_path, 1)

    def hostile(device: FakeDevice, call: int) -> object:
        if call == 1:
            raise WorkloadFailed(evil)
        return device.usual(tmp_path / "one", "quick").model_copy(update={"why": evil, "notes": (evil,)})

    with LabStore(tmp_path / "lab.sqlite") as store:
        run = begun(store, lab)
        run_lab(lab, store, run, fakes(lab, device_0=hostile), clock=QUICK)  # type: ignore[arg-type]
        rows = list(rows_of(store, run))
        report = report_of(store, run, rows, None)
        html, text, xml = page(report), markdown(report), junit(store, run, rows)
    assert "<script>alert" not in html and "\x1b" not in xml.decode() and "\x00" not in xml.decode()
    assert ElementTree.fromstring(xml).get("failures") == "1"
    assert exit_code(rows) == 4 and "1 failed" in text


@pytest.mark.parametrize(
    ("answer", "said"),
    {
        "nothing": (b"", "0 lines"),
        "two": (b"{}\n{}\n", "2 lines"),
        "no JSON": (b"hello", "no measurement"),
        "another object": (b'{"version": 1}', "no measurement"),
        "too much": (b" " * (kinds.MAX_ANSWER_BYTES + 1), "at most"),
    }.items(),
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_an_answer_that_is_no_measurement_is_refused(answer: str, said: tuple[bytes, str]) -> None:
    data, word = said
    with pytest.raises(WorkloadFailed, match=word):
        read_measurement(data, who="a phone", artifact_sha256="a", workload_sha256="b")


def stand_in(folder: Path, body: str) -> str:
    """Write a program that replaces Python and misbehaves instead of measuring."""
    path = folder / "stand-in"
    path.write_text(f"#!{sys.executable}\n" + textwrap.dedent(body))
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(os.name != "posix", reason="the stand-ins are scripts")
@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ("print('hello')", WorkloadFailed, "no measurement"),
        ("import sys; sys.exit('edgekit: no such artifact')", WorkloadFailed, "no such artifact"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", DeviceUnreachable, "SIGKILL"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", DeviceTimeout, "took longer"),
        ("import time; time.sleep(600)", DeviceTimeout, "took longer"),
        ("print('x' * 10, flush=True); import os; os.close(1); import sys; sys.exit(3)", WorkloadFailed, "exit code 3"),
        ("import errno; raise OSError(errno.ENOSPC, 'No space left on device')", DeviceFailed, "disk is full"),
    ],
    ids=["wrong output", "refused", "killed", "stopped", "slow", "an exit code", "disk full"],
)
def test_failures_of_a_local_measurement_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, error: type[Exception], said: str
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    fake(tmp_path / "one")
    spec = DeviceSpec(
        name="here", kind="local", profile="raspberry-pi-5-8gb", options={"python": stand_in(tmp_path, body)}
    )
    device = connect(spec)
    with device.acquire(timeout_s=60), pytest.raises(error, match=said) as raised:
        device.measure(tmp_path / "one", Path("quick"), timeout_s=1.0 if error is DeviceTimeout else 120.0)
    assert raised.type is error


@pytest.mark.skipif(os.name != "posix", reason="the stand-ins are scripts")
def test_children_of_a_local_measurement_are_killed_with_it(tmp_path: Path) -> None:
    noted = tmp_path / "child"
    body = f"""
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open({f"{noted}.part"!r}, "w").write(str(child.pid))
    os.rename({f"{noted}.part"!r}, {str(noted)!r})
    time.sleep(600)
    """
    fake(tmp_path / "one")
    options = {"python": stand_in(tmp_path, body)}
    device = connect(DeviceSpec(name="here", kind="local", profile="raspberry-pi-5-8gb", options=options))
    for timeout_s in (1.0, 5.0, 25.0, 125.0):  # a busy machine may not have begun the child in the first
        with pytest.raises(DeviceTimeout):
            device.measure(tmp_path / "one", Path("quick"), timeout_s=timeout_s)
        if noted.exists():
            break
    child = int(noted.read_text())
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        try:
            if "Z (" in Path(f"/proc/{child}/status").read_text():
                return
        except OSError:
            return  # gone, and waited for
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("a child lived on")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are set on Linux only")
def test_the_memory_of_a_local_measurement_is_bounded(tmp_path: Path) -> None:
    fake(tmp_path / "one")
    body = """
    import resource, time
    while resource.getrlimit(resource.RLIMIT_DATA)[0] != 256 << 20:
        time.sleep(0.01)
    block = bytearray(1 << 30)
    print(len(block))
    """
    spec = DeviceSpec(
        name="here",
        kind="local",
        profile="raspberry-pi-5-8gb",
        limits=DeviceLimits(memory_bytes=256 << 20),
        options={"python": stand_in(tmp_path, body)},
    )
    with pytest.raises(WorkloadFailed, match="MemoryError"):
        connect(spec).measure(tmp_path / "one", Path("quick"), timeout_s=120.0)


def test_a_local_device_refuses_unsupported_options() -> None:
    assert LocalDevice(DeviceSpec(name="a", kind="local")).ping(timeout_s=120).startswith("edgekit")
    for spec, said in (
        (DeviceSpec(name="a", kind="local", address="host"), "no address"),
        (DeviceSpec(name="a", kind="local", options={"pyhton": "x"}), "option 'pyhton': known are loads \\(int\\)"),
    ):
        with pytest.raises(InvalidInput, match=said):
            LocalDevice(spec)
    with pytest.raises(DeviceUnreachable, match="cannot be started"):
        LocalDevice(DeviceSpec(name="a", kind="local", options={"python": "/nowhere/python"})).ping(timeout_s=5)


def test_paths_are_relative_to_the_lab_file(lab: Path) -> None:
    assert read_lab(lab).artifacts == (str(lab.parent / "one"), str(lab.parent / "two"))
    told = yaml.safe_load(lab.read_text())
    told["devices"][0] |= {
        "profile": "mine.yaml",
        "options": {"identity": "key", "known_hosts": "~/hosts", "user": "me"},
    }
    told |= {"models": [{"model": "demo", "recipe": "rules.yaml"}, {"model": "demo", "recipe": "s8"}]}
    told |= {"workloads": ["quick", "ours.yml"], "profiles": ["devices"]}
    lab.write_text(yaml.safe_dump(told))
    found = read_lab(lab)
    here, device = lab.parent, found.devices[0]
    assert device.profile == str(here / "mine.yaml") and found.devices[1].profile == "pixel-9"
    assert device.options == {"identity": str(here / "key"), "known_hosts": str(Path.home() / "hosts"), "user": "me"}
    assert [one.recipe for one in found.models] == [str(here / "rules.yaml"), "s8"] and found.models[0].model == "demo"
    assert found.workloads == ("quick", str(here / "ours.yml")) and found.profiles == (str(here / "devices"),)


def test_a_longer_deadline_is_given_to_the_warm_ups_of_more_processes(lab: Path) -> None:
    artifact, work = open_artifact(lab.parent / "one"), read_workload("quick")
    once = predicted_s(artifact.plan, work.model_copy(update={"warmups": 0, "repeats": 1}), 1)
    for loads, repeats, warmups, rounds in ((1, 4, 2, 6), (3, 4, 2, 10), (3, 2, 2, 6)):
        asked = work.model_copy(update={"repeats": repeats, "warmups": warmups})
        assert predicted_s(artifact.plan, asked, loads) == pytest.approx(rounds * once)


TESTS = """
import pytest

@pytest.mark.edgekit_device("here")
def test_on_a_device(device):
    assert device.name == "here" and device.profile.name == "raspberry-pi-5-8gb"
    assert device.measure("one", "quick", timeout_s=120).cases[0].case

@pytest.mark.edgekit_device("nowhere")
def test_on_a_device_that_is_not_there(device):
    pass

def test_without_a_mark(device):
    pass
"""


LAB_OF_LAB_PLUGIN = """
name: ours
devices:
  - {name: here, kind: local, profile: raspberry-pi-5-8gb, options: {repeats: 1, loads: 1}}
artifacts: [one]
workloads: [quick]
"""


def pytest_in(folder: Path, *arguments: str) -> str:
    installed = [entry for entry in entry_points(group="pytest11") if entry.value == "edgekit.apps.lab.pytest_plugin"]
    plugin = [] if installed else ["-p", "edgekit.apps.lab.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *plugin, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180).stdout


@pytest.mark.slow
def test_a_mark_names_the_device_and_the_fixture_measures_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_artifacts.install(tmp_path / "site", monkeypatch)
    fake(tmp_path / "one")
    (tmp_path / "test_ours.py").write_text(TESTS)
    (tmp_path / "lab.yaml").write_text(LAB_OF_LAB_PLUGIN)
    told = pytest_in(tmp_path, "--edgekit-lab", "lab.yaml", "--strict-markers")
    assert "1 passed, 2 errors" in told, told
    assert "no device 'nowhere'; it has here" in told and "needs to know which" in told
    assert "1 skipped" in (told := pytest_in(tmp_path, "-k", "on_a_device and not there")), told
    assert "--edgekit-lab lab.yaml" in told
