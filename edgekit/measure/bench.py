"""Runs a workload on one or several arms: warm-ups, interleaved repeats, a canary on both sides of every trial.

Repeats are spread over fresh processes, because one process can be slower than the next as a whole (where its pages
and threads came to lie), and trials of one process cannot tell. A trial that was disturbed is kept, marked and made
again, a few times; it is in no summary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

from edgekit.errors import EdgekitError, TargetFailed
from edgekit.interfaces import Progress
from edgekit.measure.arms import Entrant, RunningArm, needs
from edgekit.measure.energy import Meter
from edgekit.measure.entrants import bytes_per_token
from edgekit.measure.machine import Disturbance, Usage, verdict
from edgekit.measure.measurement import (
    Arm,
    CaseResult,
    Conditions,
    Measurement,
    MemoryUse,
    Predicted,
    RequestTimes,
    Status,
    Together,
    Trial,
)
from edgekit.measure.prompts import Encode, of_user, tokens_of
from edgekit.measure.statistics import summaries
from edgekit.measure.workload import Case, Workload
from edgekit.model import ModelSpec
from edgekit.runtime.drafting.speculation import SpeculationReport

ATTEMPTS = 3  # of a trial that was disturbed
COOL_DOWN_S = 2.0
LOADS = 3  # fresh processes
NO_MEMORY = MemoryUse(peak_bytes=None, peak_counter="it never ran")


class Here(Protocol):
    """The machine under test."""

    best_s: float

    def canary(self) -> float: ...
    def usage(self, processes: Sequence[int]) -> Usage: ...
    def between(self, before: Usage, after: Usage) -> Disturbance: ...
    def sleep(self, seconds: float) -> None: ...


class Contender(NamedTuple):
    """An arm with what its prompts are made by."""

    entrant: Entrant
    model: ModelSpec
    encode: Encode


class Told(NamedTuple):
    """What an arm's process tells of itself once its trials are made."""

    arm: Arm
    memory: MemoryUse
    predicted: Predicted | None
    speculation: SpeculationReport | None
    notes: tuple[str, ...]


class Bench:
    """One run over all arms and cases."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        workload: Workload,
        machine: Here,
        meter: Meter,
        around: Callable[[], Conditions],
        *,
        loads: int = LOADS,
        progress: Progress,
    ) -> None:
        self._contenders, self._workload, self._machine = contenders, workload, machine
        self._meter, self._around, self._loads, self._progress = meter, around, loads, progress
        self._trials: dict[tuple[int, str], list[Trial]] = {}
        self._told: dict[int, Told] = {}
        self._load_s: dict[int, list[float]] = {}
        self._failed: dict[int, EdgekitError] = {}
        self._done = 0

    def run(self) -> list[Measurement]:
        """One measurement for each arm, in their order. An arm that fails is a measurement too."""
        before = self._around()
        for process in range(self._loads):
            self._in_fresh_processes(process)
        after = self._around()
        around = before.model_copy(
            update={"read_gb_s_after": after.read_gb_s, "canary_s": min(before.canary_s, after.canary_s)}
        )
        return [self._measurement(index, around) for index in range(len(self._contenders))]

    def _in_fresh_processes(self, process: int) -> None:
        """Opens every arm anew and makes that process's share of the repeats; all, where there is one process."""
        repeats, loads = self._workload.repeats, self._loads
        share = [place for place in range(repeats) if place * loads // repeats == process]
        with ExitStack() as stack:
            running = self._opened(stack)
            if not share:
                return  # more processes than repeats: only opening is measured
            for place in (*range(-self._workload.warmups, 0), *share):
                for case in self._workload.cases:
                    # Arms take turns, and who begins changes from repeat to repeat.
                    for index in sorted(range(len(self._contenders)), reverse=place % 2 == 1):
                        if index in running:
                            self._step(index, running[index], case, place, process)
                        self._done += 1
                        self._say(f"{self._workload.name}: {self._name(index)}, {case.name}")
            for index, arm in running.items():
                self._hear(index, arm)

    def _opened(self, stack: ExitStack) -> dict[int, RunningArm]:
        running: dict[int, RunningArm] = {}
        for index, contender in enumerate(self._contenders):
            if index in self._failed:
                continue
            self._say(f"opening: {self._name(index)}")
            try:
                running[index] = arm = stack.enter_context(RunningArm(contender.entrant))
                self._load_s.setdefault(index, []).append(arm.load_s)
            except EdgekitError as error:
                self._failed[index] = error
        return running

    def _say(self, what: str) -> None:
        work = self._workload
        warmups = work.warmups * min(self._loads, work.repeats)
        self._progress(self._done, len(self._contenders) * len(work.cases) * (work.repeats + warmups), what)

    def _name(self, index: int) -> str:
        return self._contenders[index].entrant.arm.name

    def _hear(self, index: int, arm: RunningArm) -> None:
        """What a process tells at its end; of several, the one that took most memory counts."""
        memory, before = self._memory(index, arm), self._told.get(index)
        notes = (*(before.notes if before else ()), *arm.opened.get("notes", ()))
        told = Told(arm.arm(), memory, arm.predicted, arm.speculation, ())
        if before is not None and (memory.peak_bytes or 0) <= (before.memory.peak_bytes or 0):
            told = before
        self._told[index] = told._replace(notes=tuple(dict.fromkeys(notes)))

    def _step(self, index: int, arm: RunningArm, case: Case, place: int, process: int) -> None:
        if index in self._failed or self._refusal(index, case):
            return
        try:
            if place < 0:
                self._rounds(index, arm, case, f"warm-up {place}")
                return
            for attempt in range(ATTEMPTS):
                trial = self._trial(index, arm, case, place, attempt, process)
                self._trials.setdefault((index, case.name), []).append(trial)
                if trial.invalid is None:
                    return
                if attempt < ATTEMPTS - 1:
                    self._machine.sleep(COOL_DOWN_S * (attempt + 1))
        except EdgekitError as error:
            self._failed[index] = error

    def _trial(self, index: int, arm: RunningArm, case: Case, place: int, attempt: int, process: int) -> Trial:
        machine, watched = self._machine, [arm.process_id]
        canary_before = machine.canary()
        joules = self._meter.joules()
        before = machine.usage(watched)
        rounds = self._rounds(index, arm, case, f"{case.name} {place} {attempt}")
        after = machine.usage(watched)
        joules_after = self._meter.joules()
        canary_after = machine.canary()
        found = machine.between(before, after)
        return Trial(
            repeat=place,
            attempt=attempt,
            process=process,
            requests=tuple(times for found in rounds for times in found),
            total_s=after.at_s - before.at_s,
            canary_before=canary_before,
            canary_after=canary_after,
            waited_share=found.waited_share,
            others_share=found.others_share,
            energy_j=None if joules is None or joules_after is None else joules_after - joules,
            invalid=verdict(canary_before, canary_after, found),
            together=tuple(_together(found) for found in rounds) if arm.entrant.arm.sequences > 1 else (),
        )

    def _rounds(self, index: int, arm: RunningArm, case: Case, trial: str) -> list[list[RequestTimes]]:
        """Every request of a case, each going on from the one before where it says so; of as many users as at once."""
        found: list[list[RequestTimes]] = []
        users = range(arm.entrant.arm.sequences)
        said: list[list[int]] = [[] for _ in users]
        for request in case.requests:
            encode = self._contenders[index].encode
            prompts = [
                tokens_of(of_user(request, user), encode, said[user] if request.continues else ()) for user in users
            ]
            answers = arm.run_together(prompts, request.depth_tokens, request.output_tokens, trial)
            for _, written in answers:
                if len(written) != request.output_tokens:
                    raise TargetFailed(
                        f"{arm.entrant.arm.name}: wrote {len(written)} tokens of {request.output_tokens} in {case.name}"
                    )
            found.append([times for times, _ in answers])
            said = [tokens + written for tokens, (_, written) in zip(prompts, answers, strict=True)]
        return found

    def _prompts(self, index: int, case: Case) -> list[int]:
        """How many tokens each prompt of a case has."""
        found: list[int] = []
        for request in case.requests:
            before = [0] * (found[-1] + case.requests[len(found) - 1].output_tokens) if request.continues else []
            found.append(len(tokens_of(request, self._contenders[index].encode, before)))
        return found

    def _refusal(self, index: int, case: Case) -> str | None:
        arm = self._contenders[index].entrant.arm
        for request, tokens in zip(case.requests, self._prompts(index, case), strict=True):
            refused = needs(tokens, request.output_tokens, arm.context, arm.window)
            if refused:
                return refused
        return None

    def _memory(self, index: int, arm: RunningArm) -> MemoryUse:
        try:
            return arm.memory()
        except EdgekitError as error:
            self._failed.setdefault(index, error)
            return NO_MEMORY

    def _measurement(self, index: int, around: Conditions) -> Measurement:
        entrant = self._contenders[index].entrant
        told = self._told.get(index) or Told(entrant.arm, NO_MEMORY, entrant.predicted, None, ())
        cases = tuple(self._case(index, case, around) for case in self._workload.cases)
        status, why = self._status(index, cases)
        return Measurement(
            status=status,
            why=why,
            arm=told.arm,
            workload=self._workload.name,
            workload_sha256=self._workload.sha256,
            conditions=around,
            load_s=tuple(self._load_s.get(index, ())),
            memory=told.memory,
            predicted=told.predicted,
            cases=cases,
            energy_source=self._meter.source,
            speculation=told.speculation,
            notes=(*told.notes, *_energy_note(self._meter)),
        )

    def _case(self, index: int, case: Case, around: Conditions) -> CaseResult:
        contender = self._contenders[index]
        prompts = self._prompts(index, case)
        trials = tuple(self._trials.get((index, case.name), ()))
        summary = summaries(trials)
        depth = prompts[-1] + case.requests[-1].output_tokens // 2
        read = bytes_per_token(contender.entrant, contender.model, depth)
        roofline = None
        if "decode_tokens_per_s" in summary and around.read_gb_s:
            roofline = read * summary["decode_tokens_per_s"].median / (around.read_gb_s * 1e9)
        return CaseResult(
            case=case.name,
            prompt_tokens=tuple(prompts),
            depth_tokens=case.requests[0].depth_tokens,
            refused=self._refusal(index, case),
            trials=trials,
            summary=summary,
            roofline=roofline,
            bytes_per_token=read,
        )

    def _status(self, index: int, cases: Sequence[CaseResult]) -> tuple[Status, str]:
        """What the whole measurement is worth, and why not more."""
        if index in self._failed:
            return "failed", str(self._failed[index])[:2000]
        ran = [case for case in cases if case.refused is None]
        if not ran:
            return "refused", cases[0].refused or ""
        without = [case for case in ran if not case.summary]
        if not without:
            return "valid", ""
        reasons = [trial.invalid for case in without for trial in case.trials if trial.invalid]
        kind: Status = "throttled" if reasons and set(reasons) == {"throttled"} else "contended"
        names = ", ".join(case.case for case in without)
        return kind, f"{len(reasons)} trials of {names} were disturbed and none was not; run again on an idle machine"


def _together(requests: Sequence[RequestTimes]) -> Together:
    """All began at once, so the last to end is when all have."""
    seconds = max(request.first_token_s + request.decode_s for request in requests)
    return Together(tokens=sum(request.tokens for request in requests), seconds=seconds)


def _energy_note(meter: Meter) -> tuple[str, ...]:
    return () if meter.source else (f"energy: not measured: {meter.why}",)
