"""Runs of a lab: complete, parallel, resumable at any point, with lost measurements reported."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import signal
from itertools import count
from pathlib import Path
from threading import Barrier, Event

import pytest
from lab_fakes import QUICK, FakeDevice, begun, complete, fakes, lab_of, lost

from edgekit.apps.bench.measurement import Measurement
from edgekit.apps.lab.command import tell
from edgekit.apps.lab.devices import DeviceLimits
from edgekit.apps.lab.report import rows_of
from edgekit.apps.lab.run import Clock, EntryEvent, run_lab
from edgekit.apps.lab.store import AttemptEnd, LabStore
from edgekit.errors import DamagedArtifact, InvalidInput, UnknownName, WorkloadFailed

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the tests end processes by signals")


@pytest.fixture
def store(tmp_path: Path) -> LabStore:
    return LabStore(tmp_path / "lab.sqlite")


def test_every_device_measures_every_cell_once(store: LabStore, tmp_path: Path) -> None:
    lab = lab_of(tmp_path, 3, repeats=2)
    run, devices = begun(store, lab), fakes(lab)
    told: list[EntryEvent] = []
    info = run_lab(lab, store, run, devices, watch=told.append, clock=QUICK)
    assert info.states == {"done": 3 * 2 * 2 * 2}
    complete(store, run)
    for device in devices.values():
        assert device.most_at_once == 1 and set(device.asked.values()) == {2} and len(device.asked) == 4
    assert [one.state for one in told].count("done") == 24


def test_devices_work_at_the_same_time(store: LabStore, tmp_path: Path) -> None:
    lab = lab_of(tmp_path, 4)
    all_of_them = Barrier(4)

    def together(device: FakeDevice, call: int) -> None:
        all_of_them.wait(60)  # broken, were one of them waited for by another

    run = begun(store, lab)
    run_lab(lab, store, run, fakes(lab, **{f"device_{number}": together for number in range(4)}), clock=QUICK)
    complete(store, run)


def test_cells_keep_their_names_and_differ(store: LabStore, tmp_path: Path) -> None:
    lab = lab_of(tmp_path, 2, repeats=2)
    first, second = begun(store, lab), begun(store, lab)
    names = [[entry.id for entry, _ in store.entries(run)] for run in (first, second)]
    assert names[0] == names[1] and len(set(names[0])) == 16


def test_a_lost_device_is_retried_twice(store: LabStore, tmp_path: Path) -> None:
    def flaky(device: FakeDevice, call: int) -> None:
        if call in (2, 3):
            lost(device, call)

    lab = lab_of(tmp_path, 1)
    run = begun(store, lab)
    run_lab(lab, store, run, fakes(lab, device_0=flaky), clock=QUICK)
    complete(store, run)
    outcomes = [attempt.outcome for attempt in store.attempts(run)]
    assert sorted(outcomes) == ["infra_lost"] * 2 + ["measured"] * 4


def test_a_device_that_keeps_failing_is_quarantined(store: LabStore, tmp_path: Path) -> None:
    lab = lab_of(tmp_path, 2)
    run, devices = begun(store, lab), fakes(lab, device_0=lost)
    run_lab(lab, store, run, devices, clock=QUICK)
    assert store.states(run, "device-0") == {"lost": 1, "quarantined": 3}
    assert store.states(run, "device-1") == {"done": 4}
    assert devices["device-0"].calls == 3
    assert [row.verdict for row in rows_of(store, run)].count("lost") == 4
    # The device is back: what it missed is made up for, and nothing else.
    again = fakes(lab)
    run_lab(lab, store, run, again, clock=QUICK)
    complete(store, run)
    assert (again["device-0"].calls, again["device-1"].calls) == (4, 0)


@pytest.mark.parametrize("error", [WorkloadFailed("device-0: wrong tokens"), InvalidInput("no such thing")], ids=str)
def test_a_wrong_answer_is_not_repeated(store: LabStore, tmp_path: Path, error: Exception) -> None:
    def wrong(device: FakeDevice, call: int) -> None:
        raise error

    lab = lab_of(tmp_path, 1)
    run, devices = begun(store, lab), fakes(lab, device_0=wrong)
    run_lab(lab, store, run, devices, clock=QUICK)
    assert store.info(run).states == {"failed": 4} and devices["device-0"].calls == 4
    run_lab(lab, store, run, devices, clock=QUICK)
    assert devices["device-0"].calls == 4
    assert {row.why for row in rows_of(store, run)} == {str(error)}


@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
def test_a_throttled_device_cools_down_and_is_retried_once(store: LabStore, tmp_path: Path, always: bool) -> None:
    def hot(device: FakeDevice, call: int) -> Measurement | None:
        if call == 1 or always:
            return device.usual(tmp_path / "one", "quick").model_copy(update={"status": "throttled", "why": "hot"})
        return None

    lab = lab_of(tmp_path, 1).model_copy(update={"workloads": ("quick",), "artifacts": (str(tmp_path / "one"),)})
    run, devices = begun(store, lab), fakes(lab, device_0=hot)
    run_lab(lab, store, run, devices, clock=QUICK)
    assert devices["device-0"].calls == 2
    (row,) = rows_of(store, run)
    assert (row.verdict, row.status) == (("disturbed", "throttled") if always else ("ok", "valid"))


def test_a_device_that_stays_hot_backs_off_and_reports_it(
    store: LabStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hot(device: FakeDevice, call: int) -> Measurement | None:
        found = device.usual(tmp_path / "one", "quick")
        return found.model_copy(update={"status": "throttled", "why": "hot"}) if call <= 4 else None

    lab = lab_of(tmp_path, 1)
    limits = DeviceLimits(cool_down_s=0.001)
    lab = lab.model_copy(update={"devices": (lab.devices[0].model_copy(update={"limits": limits}),)})
    told: list[EntryEvent] = []
    run = begun(store, lab)
    monkeypatch.setattr("edgekit.apps.lab.run.LONGEST_COOL_DOWN_S", 0.005)
    waited: list[float] = []
    wait = Event.wait
    monkeypatch.setattr(Event, "wait", lambda self, timeout=None: waited.append(timeout) or wait(self, timeout))
    run_lab(lab, store, run, fakes(lab, device_0=hot), watch=told.append)
    # Two cells were asked twice each, both stayed throttled, and the third came back cool.
    assert [seconds for seconds in waited if seconds is not None and seconds < 0.01] == [0.001, 0.002, 0.004, 0.005]
    assert [one.why for one in told if "still hot" in one.why] == ["still hot; waits 0 s"] * 2
    assert [row.verdict for row in rows_of(store, run)] == ["disturbed", "disturbed", "ok", "ok"]


def test_a_result_that_is_delivered_twice_counts_once(store: LabStore, tmp_path: Path) -> None:
    lab = lab_of(tmp_path, 1)
    run = begun(store, lab)
    device = FakeDevice(lab.devices[0])
    taken = store.take(run, "device-0", 1.0)
    assert taken is not None
    entry, number = taken
    first, second = (device.usual(Path(entry.artifact), entry.workload, speed) for speed in (100.0, 50.0))
    assert store.end(run, entry.id, number, AttemptEnd("measured", "done", result=first), 2.0)
    assert not store.end(run, entry.id, number, AttemptEnd("measured", "done", result=second), 3.0)
    assert not store.end(run, entry.id, number + 1, AttemptEnd("infra_lost", "waiting", "late", second), 3.0)
    assert store.result(run, entry.id) == first
    assert store.states(run, "device-0") == {"done": 1, "waiting": 3}


def test_ctrl_c_stops_the_devices_and_the_run_can_be_resumed(store: LabStore, tmp_path: Path) -> None:
    def waiting(device: FakeDevice, call: int) -> None:
        if call == 2:
            _thread.interrupt_main()
            assert device.stopped.wait(60)
            lost(device, call)

    lab = lab_of(tmp_path, 1)
    run = begun(store, lab)
    with pytest.raises(KeyboardInterrupt):
        run_lab(lab, store, run, fakes(lab, device_0=waiting), clock=QUICK)
    assert store.info(run).states == {"done": 1, "waiting": 3} and store.info(run).ended_at is None
    devices = fakes(lab)
    run_lab(lab, store, run, devices, clock=QUICK)
    complete(store, run)
    assert devices["device-0"].calls == 3


def test_a_second_process_cannot_drive_a_run(store: LabStore, tmp_path: Path) -> None:
    lab = lab_of(tmp_path, 1)
    run = begun(store, lab)

    def second(device: FakeDevice, call: int) -> None:
        with pytest.raises(InvalidInput, match="driven already"):
            run_lab(lab, store, run, fakes(lab), clock=QUICK)

    run_lab(lab, store, run, fakes(lab, device_0=second), clock=QUICK)
    complete(store, run)


def test_a_bug_in_a_device_is_raised(store: LabStore, tmp_path: Path) -> None:
    def broken(device: FakeDevice, call: int) -> None:
        raise ZeroDivisionError

    lab = lab_of(tmp_path, 2)
    run = begun(store, lab)
    with pytest.raises(ZeroDivisionError):
        run_lab(lab, store, run, fakes(lab, device_1=broken), clock=QUICK)
    run_lab(lab, store, run, fakes(lab), clock=QUICK)
    complete(store, run)


def victim(path: Path, folder: Path, run: str, commit: int, after: bool) -> None:
    """Run the lab and die by SIGKILL just before or after the given commit."""
    lab = lab_of(folder, 2)
    store, seen = LabStore(path), count(1)

    class Dying:
        def __init__(self, base: object) -> None:
            self._base = base

        def execute(self, statement: str, *values: object) -> object:
            dies = statement == "COMMIT" and next(seen) == commit
            if dies and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            done = self._base.execute(statement, *values)  # type: ignore[attr-defined]
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        def __getattr__(self, name: str) -> object:
            return getattr(self._base, name)

    store._base = Dying(store._base)  # type: ignore[assignment]
    run_lab(lab, store, run, fakes(lab), clock=Clock(back_off_s=0.0))
    os._exit(7)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_any_commit_loses_and_duplicates_nothing(tmp_path: Path, after: bool) -> None:
    lab, path = lab_of(tmp_path, 2), tmp_path / "lab.sqlite"
    fork = multiprocessing.get_context("fork")
    survived = False
    for commit in range(1, 40):
        with LabStore(path) as store:
            run = begun(store, lab)
        process = fork.Process(target=victim, args=(path, tmp_path, run, commit, after))
        process.start()
        process.join(300)
        if process.exitcode == 7:
            survived = True
            break
        assert process.exitcode == -signal.SIGKILL
        with LabStore(path) as store:
            before = {entry.id: store.result(run, entry.id) for entry, state in store.entries(run) if state == "done"}
            assert None not in before.values()
            devices = fakes(lab)
            run_lab(lab, store, run, devices, clock=QUICK)
            complete(store, run)
            assert sum(device.calls for device in devices.values()) == 8 - len(before)
            assert {name: store.result(run, name) for name in before} == before
    assert survived and commit > 16


def test_each_event_is_a_line(store: LabStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = lab_of(tmp_path, 2)
    run = begun(store, lab)
    run_lab(lab, store, run, fakes(lab, device_1=lost), watch=tell, clock=QUICK)
    shown = capsys.readouterr().err
    assert [line.split()[:2] for line in shown.splitlines()].count(["device-0:", "done"]) == 4
    assert "device-1: quarantined: not tried any more: 3\n" in shown


def test_a_file_that_is_not_a_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lab.sqlite"
    path.write_text("not a database, and longer than a header would be " * 20)
    with pytest.raises(DamagedArtifact, match="not a store of lab runs"):
        LabStore(path)
    with LabStore(tmp_path / "new.sqlite") as store:
        with pytest.raises(InvalidInput, match="the store is empty"):
            store.info("run-1")
        lab = lab_of(tmp_path, 1)
        begun(store, lab)
        with pytest.raises(UnknownName, match="run-1"):
            store.info("run-1")
        store._base.execute("PRAGMA user_version=99")
    with pytest.raises(InvalidInput, match="newer edgekit"):
        LabStore(tmp_path / "new.sqlite")
