"""The fit guard: gives memory back in fixed steps while the system is short of it.

Steps, each in the metrics: drop cached prefixes and keep no new ones; return unused memory to the system; fewer bits in
the caches of new requests; refuse new requests. Running requests go on. Heat and a low battery pause drafting and
halve the threads of engines that can change their number.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from edgekit.common.footprint import return_unused
from edgekit.common.log import log
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.errors import DoesNotFit

if TYPE_CHECKING:
    from edgekit.contracts.engine import Engine
    from edgekit.runtime.driver import Driver
    from edgekit.runtime.prefix_cache.tree import Prefixes

PressureStep = Literal["prefixes", "idle memory", "cache bits", "refuse"]
STEPS: tuple[PressureStep, ...] = ("prefixes", "idle memory", "cache bits", "refuse")

_PSI = Path("/proc/pressure/memory")
_SOME = re.compile(r"some avg10=(\d{1,3}\.\d{1,2})")
_HIGH_PERCENT, _LOW_PERCENT = 10.0, 1.0  # share of the last ten seconds in which a task waited for memory
_EVERY_S = 1.0
_REST_S = 10.0  # of low pressure before one step is undone


class FitGuard:
    """The steps in force. Not thread-safe: the driver lets one thread at a time use it."""

    def __init__(self, take: Callable[[PressureStep], bool], give: Callable[[PressureStep], None]) -> None:
        """`take` does a step, or returns False if it would free nothing; `give` undoes it."""
        self._take, self._give = take, give
        self.taken: list[PressureStep] = []
        self.counts: Counter[str] = Counter()

    def press(self, *, critical: bool = False) -> tuple[PressureStep, ...]:
        """Do the next step that frees memory; if critical, all of them except refusing requests."""
        done: list[PressureStep] = []
        for step in STEPS:
            if step in self.taken or (step == "refuse" and critical and done):
                continue
            if self._take(step):
                self.taken.append(step)
                done.append(step)
                self.counts[step] += 1
                log.warning("memory is short: %s", step)
                if not critical:
                    break
        return tuple(done)

    def relax(self, *, all_steps: bool = False) -> None:
        """Undo the last step, or all of them."""
        while self.taken:
            step = self.taken.pop()
            self._give(step)
            log.info("memory is enough again: %s is taken back", step)
            if not all_steps:
                break


class PressureWatch:
    """Reads how long tasks waited for memory (Linux PSI) between two steps of the runtime, once a second."""

    def __init__(
        self,
        guard: FitGuard,
        read: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._guard, self._read, self._clock = guard, read or waiting_percent, clock
        self._next_at = self._calm_since = clock()

    def before_step(self) -> None:
        pass

    def after_step(self, tokens: int, has_answered: bool) -> None:
        self.look()

    def look(self) -> None:
        """Press or relax the guard according to the system's pressure, at most once a second."""
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + _EVERY_S
        percent = self._read()
        if percent is None:
            return
        if percent >= _HIGH_PERCENT:
            self._guard.press()
        if percent > _LOW_PERCENT:
            self._calm_since = now
        elif now - self._calm_since >= _REST_S and self._guard.taken:
            self._guard.relax()
            self._calm_since = now


def waiting_percent(path: Path = _PSI) -> float | None:
    """Return the share of the last ten seconds in which a task waited for memory; None without PSI."""
    try:
        match = _SOME.match(path.read_text())
    except OSError:
        return None
    return float(match[1]) if match else None


class PressureControl:
    """Takes an app's reports about its device: memory pressure, heat and battery. Threads may share it."""

    def __init__(
        self, driver: Driver, engine: Engine, prefixes: Prefixes | None, watch: Callable[[PressureWatch], None]
    ) -> None:
        """`watch` registers a watch that is called at every step of the runtime."""
        self._driver, self._engine, self._prefixes, self._watch_steps = driver, engine, prefixes, watch
        self._guard = FitGuard(self._give_up, self._take_back)
        self._watch: PressureWatch | None = None
        self.pauses_drafting = False
        self._saving: tuple[str, ...] = ()

    def memory_short(self, *, critical: bool = False) -> tuple[PressureStep, ...]:
        """Give memory back; call it from `onTrimMemory` or `didReceiveMemoryWarning`. Returns the steps done now.

        Each call does the next step: drop cached prefixes, return unused memory, use fewer cache bits for new requests,
        refuse new requests. `critical` does all but the last at once. Running requests continue.
        """
        return self._driver.exclusively(lambda: self._guard.press(critical=critical))

    def memory_normal(self) -> None:
        """Undo every step of `memory_short`."""
        self._driver.exclusively(lambda: self._guard.relax(all_steps=True))

    def watch(self) -> bool:
        """Follow the system's memory pressure (Linux PSI) while requests run; return False if the system has no PSI."""
        if waiting_percent() is None:
            return False
        if self._watch is None:
            self._watch = PressureWatch(self._guard)
            self._watch_steps(self._watch)
        return True

    def set_power(self, *, is_hot: bool = False, battery_is_low: bool = False) -> tuple[str, ...]:
        """Save energy while the device is hot or its battery low; return the measures in force, and impossible ones.

        New requests do not draft, and running ones go on with half of the threads where the engine can change them.
        """
        saves = is_hot or battery_is_low
        if saves != self.pauses_drafting:
            self._saving = self._driver.exclusively(lambda: self._save_energy(saves))
        return self._saving

    def _save_energy(self, saves: bool) -> tuple[str, ...]:
        self.pauses_drafting = saves
        most = self._engine.capabilities.threads
        if most is not None:
            self._engine.use_threads(-(-most // 2) if saves else most)
        if not saves:
            return ()
        self._guard.counts.update(["drafting", "threads"] if most else ["drafting"])
        threads = (
            f"{-(-most // 2)} of {most} threads" if most else "threads as at opening: this engine cannot change them"
        )
        return ("no drafting", threads)

    def kv_config(self, asked: KVCacheConfig, policy: KVEvictionPolicy) -> KVCacheConfig:
        """Return the cache of a new request, with fewer bits while memory is short. Raises `DoesNotFit` if refused."""
        if self._watch is not None and "refuse" in self._guard.taken:
            self._driver.exclusively(self._watch.look)  # steps do this, but none may be running
        if "refuse" in self._guard.taken:
            raise DoesNotFit("the system is short of memory, so new requests are refused for now; try again later")
        if "cache bits" not in self._guard.taken:
            return asked
        return asked.model_copy(
            update={"kv_bits": min(*policy.widths(self._engine.capabilities.kv_bits), asked.kv_bits)}
        )

    @property
    def figures(self) -> dict[str, object]:
        """The steps so far and those in force, by their names in `Metrics`."""
        return {
            "pressure_steps": dict(self._guard.counts),
            "pressure_now": tuple(self._guard.taken),
            "saving_now": self._saving,
        }

    def _give_up(self, step: PressureStep) -> bool:
        """Do a step; return False if it frees nothing."""
        if step == "prefixes":
            if self._prefixes is None:
                return False
            self._prefixes.keeps_new = False
            self._prefixes.shrink(self._prefixes.taken_bytes)
        elif step == "idle memory":
            return_unused()
        elif step == "cache bits":
            return len(self._engine.capabilities.kv_bits) > 1
        return True

    def _take_back(self, step: PressureStep) -> None:
        if step == "prefixes" and self._prefixes is not None:
            self._prefixes.keeps_new = True
