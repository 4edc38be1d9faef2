"""Runs a lab: all devices in parallel, each with its own queue; each result is stored before the next entry begins.

A lost device is retried, and quarantined if it keeps failing. A failure of the workload is a result and is not
retried.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from time import time
from typing import NamedTuple

from edgekit.apps.lab.devices import LabDevice
from edgekit.apps.lab.matrix import Lab, MatrixEntry
from edgekit.apps.lab.store import AttemptEnd, EntryOutcome, EntryState, LabStore, RunInfo
from edgekit.common.file_lock import file_lock
from edgekit.errors import DeviceFailed, EdgekitError, InvalidInput, WorkloadFailed

MOST_LOST, MOST_DISTURBED, QUARANTINE_AFTER = 2, 1, 3
LONGEST_COOL_DOWN_S = 3600.0


class EntryEvent(NamedTuple):
    """An event for observers: a device began or ended an entry."""

    device: str
    entry: MatrixEntry | None
    state: EntryState
    why: str = ""


Watcher = Callable[[EntryEvent], None]


class Clock(NamedTuple):
    """The clock and the intervals of a run, replaceable in tests."""

    now: Callable[[], float] = time
    back_off_s: float = 2.0


_USUAL = Clock()


def new_run() -> str:
    """Return a new, unique name of a run."""
    return f"run-{secrets.token_hex(5)}"


def run_lab(
    lab: Lab,
    store: LabStore,
    run: str,
    devices: Mapping[str, LabDevice],
    *,
    watch: Watcher = lambda event: None,
    clock: Clock = _USUAL,
) -> RunInfo:
    """Run until no entry is waiting. An interrupted run keeps its results and can be resumed."""
    with _only_one(store.path, run):
        store.reopen(run, clock.now())
        stop = Event()
        workers = [_DeviceWorker(lab, store, run, devices[spec.name], watch, clock, stop) for spec in lab.devices]
        threads = [Thread(target=worker.work, name=worker.device.name, daemon=True) for worker in workers]
        try:
            for thread in threads:
                thread.start()
            for worker in workers:
                # Not `join`: after an interrupt in it, Python reports a running thread as ended.
                while not worker.ended.wait(0.2):
                    pass
        finally:
            stop.set()
            for worker in workers:
                worker.device.stop()
            for thread in threads:
                if thread.ident is not None:  # an interrupt may come before it was started
                    thread.join(10)
        for worker in workers:
            if worker.error is not None:
                raise worker.error
        store.finish(run, clock.now())
    return store.info(run)


class _DeviceWorker:
    """A thread that processes one device's queue."""

    def __init__(
        self, lab: Lab, store: LabStore, run: str, device: LabDevice, watch: Watcher, clock: Clock, stop: Event
    ) -> None:
        self.lab, self.store, self.run, self.device = lab, store, run, device
        self.watch, self.clock, self.stop = watch, clock, stop
        self.limits = next(spec.limits for spec in lab.devices if spec.name == device.name)
        self.failures = 0  # lost attempts in a row
        self.throttled_in_a_row = 0  # measurements
        self.error: BaseException | None = None
        self.ended = Event()

    def work(self) -> None:
        try:
            while not self.stop.is_set():
                taken = self.store.take(self.run, self.device.name, self.clock.now())
                if taken is None:
                    return
                self._attempt(*taken)
                if self.failures >= QUARANTINE_AFTER:
                    given_up = self.store.quarantine(self.run, self.device.name)
                    self.watch(EntryEvent(self.device.name, None, "quarantined", f"not tried any more: {given_up}"))
                    return
        except BaseException as error:
            self.error = error  # a bug of ours; the other devices finish their entries
            self.stop.set()
        finally:
            self.ended.set()

    def _attempt(self, entry: MatrixEntry, number: int) -> None:
        self.watch(EntryEvent(self.device.name, entry, "running"))
        try:
            with self.device.acquire(timeout_s=entry.timeout_s):
                measurement = self.device.measure(Path(entry.artifact), Path(entry.workload), timeout_s=entry.timeout_s)
        except (WorkloadFailed, InvalidInput) as error:
            self.failures = 0
            self._end(entry, number, "failed", "failed", str(error))
        except (DeviceFailed, OSError) as error:
            if self.stop.is_set():
                self._end(entry, number, "stopped", "waiting", "the lab was stopped")
                return
            self.failures += 1
            times_lost = self.store.outcomes(self.run, entry.id).count("infra_lost")
            self._end(entry, number, "infra_lost", "lost" if times_lost >= MOST_LOST else "waiting", _why(error))
            self.stop.wait(self.clock.back_off_s * self.failures)
        except EdgekitError as error:
            self.failures = 0
            self._end(entry, number, "failed", "failed", str(error))
        else:
            self.failures = 0
            self.throttled_in_a_row = self.throttled_in_a_row + 1 if measurement.status == "throttled" else 0
            disturbed = measurement.status in ("throttled", "contended")
            if disturbed and self.store.outcomes(self.run, entry.id).count("disturbed") < MOST_DISTURBED:
                why = f"{measurement.status}: {measurement.why}; waits {self._cool_down_s():.0f} s"
                self._end(entry, number, "disturbed", "waiting", why)
                self.stop.wait(self._cool_down_s())
                return
            state: EntryState = "failed" if measurement.status in ("failed", "refused") else "done"
            outcome: EntryOutcome = "failed" if state == "failed" else "measured"
            ended = AttemptEnd(outcome, state, measurement.why, measurement)
            is_new = self.store.end(self.run, entry.id, number, ended, self.clock.now())
            self.watch(
                EntryEvent(
                    self.device.name, entry, state, measurement.why if is_new else "delivered twice; the first counts"
                )
            )
            if self.throttled_in_a_row and self.store.states(self.run, self.device.name).get("waiting"):
                self.watch(
                    EntryEvent(self.device.name, None, "waiting", f"still hot; waits {self._cool_down_s():.0f} s")
                )
                self.stop.wait(self._cool_down_s())

    def _cool_down_s(self) -> float:
        """Return the cool-down in seconds, doubled for each consecutive throttled answer."""
        return min(self.limits.cool_down_s * 2.0 ** min(max(0, self.throttled_in_a_row - 1), 12), LONGEST_COOL_DOWN_S)

    def _end(self, entry: MatrixEntry, number: int, outcome: EntryOutcome, state: EntryState, why: str) -> None:
        self.store.end(self.run, entry.id, number, AttemptEnd(outcome, state, why), self.clock.now())
        self.watch(EntryEvent(self.device.name, entry, state, why))


def _why(error: BaseException) -> str:
    if isinstance(error, DeviceFailed):
        return str(error)
    return f"{type(error).__name__}: {error}"


@contextmanager
def _only_one(store: Path, run: str) -> Iterator[None]:
    """Lock a run during the block; refuse a second one. The OS drops the lock when the process ends."""
    with file_lock(store.with_name(f"{store.name}.{run}.lock"), None, "choose another --store") as is_ours:
        if not is_ours:
            raise InvalidInput(f"{run}: is being driven already; wait for it")
        yield
