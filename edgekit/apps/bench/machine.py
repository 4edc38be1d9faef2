"""The disturbance of a trial: a canary before and after it, and the CPU use of other processes during it.

Linux reports how long threads waited for a core and how busy all cores were. On other systems only the canary decides,
and the measurement says so.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ConfigDict, RootModel

from edgekit.common import machine_facts as facts
from edgekit.common.bounds import Count, MachineNumber
from edgekit.common.cores import cores_allowed

CONTENDED_SHARE = 0.05  # waiting over wall time, or cores used by others
THROTTLED = 1.10  # canary over the best seen
_CANARY_BYTES, _ROUNDS = 2 << 20, 3
_LONG_ENOUGH_S = 0.2  # the kernel counts busy cores in hundredths of a second, by sampling
_ROUNDED_S = 0.02  # rounding error of the counters of all other processes together on an idle machine
_LOOK_S = 0.3
_TICKS_PER_S = 100  # USER_HZ, the same on every processor that runs models
_SUBJECT, _NAME = "this-machine", "canary"


class CanaryTimes(RootModel[dict[Count, MachineNumber]]):
    """The fact of the best canary time, in seconds by cores."""

    model_config = ConfigDict(frozen=True, strict=True)


class Usage(NamedTuple):
    """Counters at one moment; None: not reported by the OS."""

    at_s: float
    waited_s: float | None  # by the threads of the watched processes
    own_s: float | None  # of cores, used by the watched processes
    busy_s: float | None  # of cores, used by all processes, stolen time included
    others_s: dict[int, float]  # of cores, used by each other process; empty if the OS does not report it


class Disturbance(NamedTuple):
    """The disturbance between two moments; None: not reported by the OS."""

    waited_share: float | None  # time that threads were ready and had no core, over the wall time
    others_share: float | None  # of all cores, used by other processes or stolen from this machine

    @property
    def is_contended(self) -> bool:
        return any(share is not None and share > CONTENDED_SHARE for share in self)


class Machine:
    """This machine's canary and counters."""

    def __init__(self) -> None:
        self.cores = cores_allowed()
        known = facts.read_fact(_SUBJECT, _NAME, CanaryTimes)
        self._known = known.root.get(self.cores) if known else None
        self.best_s = min(self._known or float("inf"), *(self._canary() for _ in range(3)))

    def canary(self) -> float:
        """Run a fixed piece of work on every core; return its time divided by the best time so far."""
        seconds = self._canary()
        self.best_s = min(self.best_s, seconds)
        return seconds / self.best_s

    def others_share(self) -> float | None:
        """Return the share of all cores that other processes use now; None: not reported by the OS."""
        before = self.usage(())
        time.sleep(_LOOK_S)
        return self.between(before, self.usage(())).others_share

    def remember(self) -> None:
        """Store the best canary time for the next start."""
        if self._known is None or self.best_s < self._known:
            facts.write_fact(_SUBJECT, _NAME, CanaryTimes({self.cores: self.best_s}))

    def usage(self, processes: Sequence[int]) -> Usage:
        """Return the current counters."""
        return Usage(
            time.perf_counter(),
            _sum(map(_waited_s, processes)),
            _sum(map(_used_s, processes)),
            _busy_s(),
            _others_s({*processes, os.getpid()}),
        )

    def between(self, before: Usage, after: Usage) -> Disturbance:
        """Return the disturbance of the watched processes between two moments."""
        wall = max(after.at_s - before.at_s, 1e-9)
        waited = others = None
        if before.waited_s is not None and after.waited_s is not None:
            waited = max(0.0, after.waited_s - before.waited_s) / wall
        counters = (before.busy_s, after.busy_s, before.own_s, after.own_s)
        if wall >= _LONG_ENOUGH_S and None not in counters:
            busy = (after.busy_s or 0.0) - (before.busy_s or 0.0)
            own = (after.own_s or 0.0) - (before.own_s or 0.0)
            # Both counters are rounded, so a few hundredths of a second mean nothing.
            others = max(0.0, busy - own - 0.03) / (wall * self.cores)
        if after.others_s:
            # Exact, so it also shows in short trials; processes that started and ended in between are missed.
            used = sum(max(0.0, now - before.others_s.get(one, 0.0)) for one, now in after.others_s.items())
            others = max(others or 0.0, max(0.0, used - _ROUNDED_S) / (wall * self.cores))
        return Disturbance(waited, others)

    def sleep(self, seconds: float) -> None:
        """Wait for the machine to cool down, or for other programs to finish."""
        time.sleep(seconds)

    def _canary(self) -> float:
        data = bytes(_CANARY_BYTES)

        def work() -> float:
            began = time.perf_counter()
            hashlib.sha256(data).digest()
            return time.perf_counter() - began

        with ThreadPoolExecutor(self.cores) as threads:
            rounds = []
            for _ in range(_ROUNDS):
                running = [threads.submit(work) for _ in range(self.cores)]
                rounds.append(max(each.result() for each in running))
        return min(rounds)


def verdict(before: float, after: float, disturbance: Disturbance) -> Literal["contended", "throttled"] | None:
    """Describe what disturbed a trial, from its canaries and counters; None if nothing did."""
    if disturbance.is_contended:
        return "contended"
    if max(before, after) > THROTTLED:
        # Without counters, other programs and heat cannot be distinguished.
        return "throttled" if disturbance.waited_share is not None else "contended"
    return None


def _sum(values: map[float | None]) -> float | None:
    figures = list(values)
    known = [value for value in figures if value is not None]
    return sum(known) if known and len(known) == len(figures) else None


def _waited_s(process: int) -> float | None:
    """Return the seconds that threads of a process spent ready to run without a core."""
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        return sum(int((thread / "schedstat").read_text().split()[1]) for thread in threads) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def _used_s(process: int) -> float | None:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    except (OSError, ValueError, IndexError):
        return None


def _others_s(own: set[int]) -> dict[int, float]:
    try:
        names = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    except OSError:
        return {}
    used = ((process, _used_s(process)) for process in names if process not in own)
    return {process: seconds for process, seconds in used if seconds is not None}


def _busy_s() -> float | None:
    """Return the busy seconds of all cores, including time stolen by a hypervisor."""
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        user, nice, system, _, _, interrupts, soft, stolen = fields
        return (user + nice + system + interrupts + soft + stolen) / _TICKS_PER_S
    except (OSError, ValueError, IndexError):
        return None
