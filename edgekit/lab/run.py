"""One run of a lab: every device works through its own queue, all at once, and every result is kept before the next.

A device that is lost is tried again, and one that fails again and again is left alone; a wrong answer is a result and
is never asked again.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from time import time
from typing import NamedTuple, Protocol

from edgekit.errors import DeviceFailed, EdgekitError, InvalidInput, OutOfSpace, WorkloadFailed
from edgekit.lab.devices import LabDevice
from edgekit.lab.matrix import Cell, Lab
from edgekit.lab.store import RunInfo, State, Store

MOST_LOST, MOST_DISTURBED, QUARANTINE_AFTER = 2, 1, 3
_BEAT_S, _LONGEST_COOL_DOWN_S = 10.0, 3600.0


class Told(NamedTuple):
    """What a watcher learns: a device has begun a cell, or has ended one."""

    device: str
    cell: Cell | None
    state: State
    why: str = ""


class Watcher(Protocol):
    def __call__(self, told: Told) -> None: ...


class Pacing(NamedTuple):
    """The clock of a run, and how it waits; tests bring their own."""

    now: Callable[[], float] = time
    beat_s: float = _BEAT_S
    back_off_s: float = 2.0


_USUAL = Pacing()


def new_run() -> str:
    """A name that no other run has."""
    return f"run-{secrets.token_hex(5)}"


def run_lab(
    lab: Lab,
    store: Store,
    run: str,
    devices: Mapping[str, LabDevice],
    *,
    watch: Watcher = lambda told: None,
    pacing: Pacing = _USUAL,
) -> RunInfo:
    """Work until nothing waits. Interrupted anywhere, the run can go on; nothing that was found is lost."""
    with _only_one(store.path, run):
        store.reopen(run, pacing.now())
        stop = Event()
        queues = [_Queue(lab, store, run, devices[spec.name], watch, pacing, stop) for spec in lab.devices]
        threads = [Thread(target=queue.work, name=queue.device.name, daemon=True) for queue in queues]
        pulse = Thread(target=_beat, args=(store, run, queues, pacing, stop), daemon=True)
        try:
            for thread in (*threads, pulse):
                thread.start()
            for queue in queues:
                # Not `join`: interrupted in it, Python takes a thread that still runs for one that has ended.
                while not queue.ended.wait(0.2):
                    pass
        finally:
            stop.set()
            for queue in queues:
                queue.device.stop()
            for thread in (*threads, pulse):
                if thread.ident is not None:  # an interrupt may come before all have begun
                    thread.join(10)
        for queue in queues:
            if queue.bug is not None:
                raise queue.bug
        store.finish(run, pacing.now())
    return store.info(run)


class _Queue:
    """What one device still has to do."""

    def __init__(
        self, lab: Lab, store: Store, run: str, device: LabDevice, watch: Watcher, pacing: Pacing, stop: Event
    ) -> None:
        self.lab, self.store, self.run, self.device = lab, store, run, device
        self.watch, self.pacing, self.stop = watch, pacing, stop
        self.limits = next(spec.limits for spec in lab.devices if spec.name == device.name)
        self.running: tuple[str, int] | None = None
        self.failures = 0  # in a row
        self.hot = 0  # throttled answers in a row
        self.bug: BaseException | None = None
        self.ended = Event()

    def work(self) -> None:
        try:
            while not self.stop.is_set():
                taken = self.store.take(self.run, self.device.name, self.pacing.now())
                if taken is None:
                    return
                self._attempt(*taken)
                if self.failures >= QUARANTINE_AFTER:
                    left = self.store.quarantine(self.run, self.device.name)
                    self.watch(Told(self.device.name, None, "quarantined", f"not tried any more: {left}"))
                    return
        except BaseException as error:
            self.bug = error  # one of ours; the other devices finish what they do
            self.stop.set()
        finally:
            self.ended.set()

    def _attempt(self, cell: Cell, number: int) -> None:
        self.watch(Told(self.device.name, cell, "running"))
        self.running = (cell.id, number)
        try:
            with self.device.acquire(timeout_s=cell.timeout_s):
                found = self.device.measure(Path(cell.artifact), Path(cell.workload), timeout_s=cell.timeout_s)
        except (WorkloadFailed, InvalidInput) as error:
            self.failures = 0
            self._end(cell, number, "failed", "failed", str(error))
        except (DeviceFailed, OSError) as error:
            if self.stop.is_set():
                self._end(cell, number, "stopped", "waiting", "the lab was stopped")
                return
            self.failures += 1
            lost = self.store.outcomes(self.run, cell.id).count("infra_lost")
            self._end(cell, number, "infra_lost", "lost" if lost >= MOST_LOST else "waiting", _why(error))
            self.stop.wait(self.pacing.back_off_s * self.failures)
        except EdgekitError as error:
            self.failures = 0
            self._end(cell, number, "failed", "failed", str(error))
        else:
            self.failures = 0
            self.hot = self.hot + 1 if found.status == "throttled" else 0
            disturbed = found.status in ("throttled", "contended")
            if disturbed and self.store.outcomes(self.run, cell.id).count("disturbed") < MOST_DISTURBED:
                why = f"{found.status}: {found.why}; waits {self._cool_down_s():.0f} s"
                self._end(cell, number, "disturbed", "waiting", why)
                self.stop.wait(self._cool_down_s())
                return
            state: State = "failed" if found.status in ("failed", "refused") else "done"
            is_new = self.store.end(
                self.run, cell.id, number, "failed" if state == "failed" else "measured", state, self.pacing.now(),
                found.why, found,
            )  # fmt: skip
            self.watch(
                Told(self.device.name, cell, state, found.why if is_new else "delivered twice; the first counts")
            )
            if self.hot and self.store.states(self.run, self.device.name).get("waiting"):
                self.watch(Told(self.device.name, None, "waiting", f"still hot; waits {self._cool_down_s():.0f} s"))
                self.stop.wait(self._cool_down_s())
        finally:
            self.running = None

    def _cool_down_s(self) -> float:
        """Twice as long after each throttled answer in a row: what did not cool it once will not the next time."""
        return min(self.limits.cool_down_s * 2.0 ** min(max(0, self.hot - 1), 12), _LONGEST_COOL_DOWN_S)

    def _end(self, cell: Cell, number: int, outcome: str, state: State, why: str) -> None:
        self.store.end(self.run, cell.id, number, outcome, state, self.pacing.now(), why)  # type: ignore[arg-type]
        self.watch(Told(self.device.name, cell, state, why))


def _why(error: BaseException) -> str:
    if isinstance(error, DeviceFailed):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _beat(store: Store, run: str, queues: list[_Queue], pacing: Pacing, stop: Event) -> None:
    while not stop.wait(pacing.beat_s):
        for queue in queues:
            running = queue.running
            if running is not None:
                with suppress(OutOfSpace):  # said by the next result, which is what it would lose
                    store.beat(run, *running, pacing.now())


_here: set[Path] = set()
_here_lock = Lock()


@contextmanager
def _only_one(store: Path, run: str) -> Iterator[None]:
    """Two processes never drive one run: the second is refused. The lock dies with its process, whatever kills it."""
    path = store.with_name(f"{store.name}.{run}.lock")
    with _here_lock:
        if path in _here:
            raise InvalidInput(f"{run}: is being driven already, by this process")
        _here.add(path)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InvalidInput(f"{run}: is being driven already, by another process; wait for it") from error
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(handle)
        with _here_lock:
            _here.discard(path)
