"""Real faults in a lab: no result is lost or doubled, the run continues, and the report shows the fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_artifacts import install
from lab_fakes import QUICK, FakeDevice, begun, complete, fakes, lab_of
from measured import fake
from ssh_hosts import answering, needs_ssh, servers

from edgekit.apps.bench.report.markdown import markdown
from edgekit.apps.lab.devices import DeviceLimits, DeviceSpec, connect
from edgekit.apps.lab.programs import lease
from edgekit.apps.lab.report import report_of, rows_of
from edgekit.apps.lab.run import Clock, run_lab
from edgekit.apps.lab.store import LabStore
from edgekit.errors import DeviceFailed, DeviceTimeout, OutOfSpace

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the tests break things in the ways of Linux"),
    pytest.mark.usefixtures("home"),
]
is_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root makes disks")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LabStore]:
    with LabStore(tmp_path / "lab.sqlite") as opened:
        yield opened


def report(store: LabStore, run: str) -> str:
    """Return the report's text, one cell per line."""
    text = markdown(report_of(store, run, list(rows_of(store, run)), None))
    return text.replace("\\", "")


DRIVER = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from lab_fakes import QUICK
from edgekit.apps.lab.devices import connect
from edgekit.apps.lab.run import run_lab
from edgekit.apps.lab.store import LabStore
store = LabStore(Path({store!r}))
lab = store.lab({run!r})
run_lab(lab, store, {run!r}, {{spec.name: connect(spec) for spec in lab.devices}}, clock=QUICK)
"""


def killed_while_measuring(store: LabStore, run: str, log: Path) -> None:
    """Run the lab in a process that is killed during its second measurement."""
    code = DRIVER.format(path=[str(Path(__file__).parents[2] / "helpers")], store=str(store.path), run=run)
    driver = subprocess.Popen([sys.executable, "-c", code])
    try:
        for _ in range(6000):
            if log.exists() and log.read_text().count("begin") == 2:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("no second measurement began")
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()


def logging(log: Path, seconds: float) -> str:
    say = f"open({str(log)!r}, 'a').write"
    return f"{say}('begin '); time.sleep({seconds}); {say}('end ')"


@pytest.mark.slow
def test_local_program_of_a_killed_lab_does_not_overlap_the_next_measurement(store: LabStore, tmp_path: Path) -> None:
    log, home, lab = tmp_path / "log", tmp_path / "agent", lab_of(tmp_path, 1)
    home.mkdir()
    template = FakeDevice(lab.devices[0]).usual(tmp_path / "one", "quick")
    (home / "template.json").write_text(template.model_dump_json())
    spec = DeviceSpec(
        name="here", kind="local", profile="raspberry-pi-5-8gb", limits=DeviceLimits(cool_down_s=0.0, timeout_s=300.0),
        environment={"TEMPLATE": str(home / "template.json")},
        options={"python": answering(home, logging(log, 1.5), by_name=True)},
    )  # fmt: skip
    lab = lab.model_copy(update={"devices": (spec,)})
    run = begun(store, lab)
    killed_while_measuring(store, run, log)
    run_lab(lab, store, run, {"here": connect(spec)}, clock=QUICK)
    complete(store, run)
    # The orphan ended before the next measurement began; no two ran at the same time.
    assert log.read_text().split() == ["begin", "end"] * 5
    (stopped,) = (one for one in store.attempts(run) if one.outcome == "stopped")
    assert f"| {stopped.entry} | 1 | stopped | the lab stopped |" in report(store, run)


@pytest.mark.slow
@needs_ssh
def test_remote_program_of_a_killed_lab_is_ended_first(store: LabStore, tmp_path: Path) -> None:
    log = tmp_path / "log"
    lab = lab_of(tmp_path, 1)
    with servers(tmp_path) as start:
        host = start()
        # The second measurement would take minutes, so the orphan was killed.
        wait = f"time.sleep(300 if open({str(log)!r}).read().count('begin') == 2 else 0.1)"
        say = f"open({str(log)!r}, 'a').write"
        spec = host.spec("host", python=answering(host.home, f"{say}('begin ')\n{wait}\n{say}('end ')"))
        lab = lab.model_copy(update={"devices": (spec,)})
        run = begun(store, lab)
        killed_while_measuring(store, run, log)
        run_lab(lab, store, run, {"host": connect(spec)}, clock=QUICK)
    complete(store, run)
    assert log.read_text().split() == ["begin", "end", "begin", *["begin", "end"] * 3]


def test_a_lease_is_held_by_one_and_dies_with_its_process(tmp_path: Path) -> None:
    with lease("a phone", "a", 1.0), pytest.raises(DeviceTimeout, match="was busy"), lease("a phone", "b", 0.1):
        pass
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\nfrom edgekit.apps.lab.programs import lease\n"
        "with lease('a phone', 'c', 5):\n    print('held', flush=True)\n    import time; time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(DeviceTimeout, match="was busy"), lease("a phone", "d", 0.2):
            pass
        with lease("another phone", "d", 0.2):
            pass
    finally:
        other.kill()
        other.communicate()
    with lease("a phone", "d", 5.0):
        pass


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Callable[[str], None]]:
    """Yield a disk of the given size and a function that resizes it."""
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]).returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        yield lambda other: subprocess.run(
            ["mount", "-o", f"remount,size={other}", str(place)], check=True
        ) and None  # fmt: skip
    finally:
        subprocess.run(["umount", str(place)], check=True)


@is_root
def test_full_lab_disk_stops_the_run_and_it_resumes(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, 2, repeats=10)
    place = tmp_path / "disk"
    with small_disk(place, "320k") as resize:
        with LabStore(place / "lab.sqlite") as store:
            run = begun(store, lab)
            with pytest.raises(OutOfSpace, match="make room"):
                run_lab(lab, store, run, fakes(lab), clock=QUICK)
        resize("16m")
        with LabStore(place / "lab.sqlite") as store:
            before = {entry.id: store.result(run, entry.id) for entry, state in store.entries(run) if state == "done"}
            assert 0 < len(before) < 80 and None not in before.values()
            devices = fakes(lab)
            run_lab(lab, store, run, devices, clock=QUICK)
            complete(store, run)
            assert {name: store.result(run, name) for name in before} == before
            assert sum(device.calls for device in devices.values()) == 80 - len(before)
        subprocess.run(["dd", "if=/dev/zero", f"of={place}/filling"], capture_output=True)
        with pytest.raises(OutOfSpace, match="make room"):
            LabStore(place / "lab.sqlite")


@is_root
def test_a_local_measurement_needs_no_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch)
    artifact = fake(tmp_path / "one")
    place = tmp_path / "disk"
    with small_disk(place, "4k"):
        spec = DeviceSpec(
            name="here", kind="local", profile="raspberry-pi-5-8gb", options={"repeats": 1, "loads": 1},
            environment={"EDGEKIT_HOME": str(place), "TMPDIR": str(place)},
        )  # fmt: skip
        (place / "filling").write_bytes(b"x" * 4096)
        found = connect(spec).measure(artifact.folder, Path("quick"), timeout_s=300)
    assert found.subject.artifact_sha256 == artifact.sha256 and found.cases[0].trials


def test_runs_keep_their_order_after_a_clock_change(store: LabStore, tmp_path: Path) -> None:
    lab = lab_of(tmp_path, 1)
    first, second = begun(store, lab, now=2e9), begun(store, lab, now=1.0)
    assert [info.id for info in store.history()] == [second, first]
    calls = []

    def lost_twice(device: FakeDevice, call: int) -> None:
        calls.append(call)
        if call <= 2:
            raise DeviceFailed(f"gone the {call}. time")

    backwards = Clock(now=lambda: 1e9 - 1000 * len(calls), back_off_s=0.0)
    run_lab(lab, store, first, fakes(lab, device_0=lost_twice), clock=backwards)
    complete(store, first)
    tried = [one for one in store.attempts(first) if one.outcome == "infra_lost"]
    assert [(one.number, one.why) for one in tried] == [(1, "gone the 1. time"), (2, "gone the 2. time")]
