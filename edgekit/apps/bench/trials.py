"""Runs a workload on its subjects: warm-ups, interleaved repeats, a canary before and after every trial.

Repeats are spread over fresh processes, because a whole process can be slower than the next (by the placement of its
pages and threads), which trials of one process cannot show. A disturbed trial is kept, marked and repeated a few
times; summaries leave it out. If the machine stays busy, trials are no longer repeated, to save time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from edgekit import SpeculationReport
from edgekit.apps.bench.artifact_subjects import bytes_per_token
from edgekit.apps.bench.machine import Machine, verdict
from edgekit.apps.bench.measurement import (
    CaseResult,
    Conditions,
    Measurement,
    MemoryUse,
    Predicted,
    RequestTimes,
    SubjectInfo,
    Together,
    Trial,
    TrialStatus,
)
from edgekit.apps.bench.prompts import of_user, tokens_of
from edgekit.apps.bench.statistics import summaries
from edgekit.apps.bench.subject import RunningSubject, Subject, context_error
from edgekit.apps.bench.workload import Case, Workload
from edgekit.common.progress import Progress
from edgekit.contracts.token_costs import operations_per_token
from edgekit.errors import EdgekitError, TargetFailed

ATTEMPTS = 3  # per trial, while attempts are disturbed
BUSY_AFTER = 2 * ATTEMPTS  # disturbed trials in a row, after which the machine counts as busy: no more repeats
COOL_DOWN_S = 2.0
LOADS = 3  # fresh processes
NO_MEMORY = MemoryUse(peak_bytes=None, peak_counter="it never ran")


class SubjectReport(NamedTuple):
    """The report of a subject's process after its trials."""

    info: SubjectInfo
    memory: MemoryUse
    predicted: Predicted | None
    speculation: SpeculationReport | None
    notes: tuple[str, ...]


class BenchRun:
    """One run of a workload over all subjects.

    Args:
        conditions: measures the machine's conditions; called before the first trial and after the last.
        loads: fresh processes per subject, which share its repeats.
        is_busy: the machine was busy before the run, so disturbed trials are not repeated.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        workload: Workload,
        machine: Machine,
        conditions: Callable[[], Conditions],
        *,
        loads: int = LOADS,
        is_busy: bool = False,
        progress: Progress,
    ) -> None:
        self._subjects, self._workload, self._machine = subjects, workload, machine
        self._conditions, self._loads, self._progress = conditions, loads, progress
        self._trials: dict[tuple[int, str], list[Trial]] = {}
        self._reports: dict[int, SubjectReport] = {}
        self._load_s: dict[int, list[float]] = {}
        self._failed: dict[int, EdgekitError] = {}
        self._done = 0
        self._disturbed_in_a_row = BUSY_AFTER if is_busy else 0

    def run(self) -> list[Measurement]:
        """Return one measurement per subject, in order, also for a failed one."""
        before = self._conditions()
        for process in range(self._loads):
            self._run_processes(process)
        after = self._conditions()
        conditions = before.model_copy(
            update={"read_gb_s_after": after.read_gb_s, "canary_s": min(before.canary_s, after.canary_s)}
        )
        return [self._measurement(index, conditions) for index in range(len(self._subjects))]

    def _run_processes(self, process: int) -> None:
        """Open every subject in a fresh process and run this process's share of the repeats."""
        repeats, loads = self._workload.repeats, self._loads
        share = [repeat for repeat in range(repeats) if repeat * loads // repeats == process]
        with ExitStack() as stack:
            running = self._open_all(stack)
            if not share:
                return  # more processes than repeats: only opening is measured
            for repeat in (*range(-self._workload.warmups, 0), *share):
                for case in self._workload.cases:
                    # Subjects take turns; the first one changes from repeat to repeat.
                    for index in sorted(range(len(self._subjects)), reverse=repeat % 2 == 1):
                        if index in running:
                            self._step(index, running[index], case, repeat, process)
                        self._done += 1
                        self._report_progress(f"{self._workload.name}: {self._name(index)}, {case.name}")
            for index, subject in running.items():
                self._collect(index, subject)

    def _open_all(self, stack: ExitStack) -> dict[int, RunningSubject]:
        running: dict[int, RunningSubject] = {}
        for index, subject in enumerate(self._subjects):
            if index in self._failed:
                continue
            self._report_progress(f"opening: {self._name(index)}")
            try:
                running[index] = stack.enter_context(RunningSubject(subject))
                self._load_s.setdefault(index, []).append(running[index].load_s)
            except EdgekitError as error:
                self._failed[index] = error
        return running

    def _report_progress(self, what: str) -> None:
        work = self._workload
        warmups = work.warmups * min(self._loads, work.repeats)
        self._progress(self._done, len(self._subjects) * len(work.cases) * (work.repeats + warmups), what)

    def _name(self, index: int) -> str:
        return self._subjects[index].info.name

    def _collect(self, index: int, subject: RunningSubject) -> None:
        """Collect the report of a process at its end; keep the report with the highest peak memory."""
        memory, before = self._memory(index, subject), self._reports.get(index)
        notes = (*(before.notes if before else ()), *subject.opened.get("notes", ()))
        report = SubjectReport(subject.info(), memory, subject.predicted, subject.speculation, ())
        if before is not None and (memory.peak_bytes or 0) <= (before.memory.peak_bytes or 0):
            report = before
        self._reports[index] = report._replace(notes=tuple(dict.fromkeys(notes)))

    def _step(self, index: int, subject: RunningSubject, case: Case, repeat: int, process: int) -> None:
        """Run one repeat of a case; a warm-up if `repeat` is negative."""
        if index in self._failed or self._refusal(index, case):
            return
        try:
            if repeat < 0:
                self._run_requests(index, subject, case, f"warm-up {repeat}")
                return
            attempts = ATTEMPTS if self._disturbed_in_a_row < BUSY_AFTER else 1
            for attempt in range(attempts):
                trial = self._trial(index, subject, case, repeat, attempt, process)
                self._trials.setdefault((index, case.name), []).append(trial)
                if trial.invalid is None:
                    self._disturbed_in_a_row = 0
                    return
                self._disturbed_in_a_row += 1
                if attempt < attempts - 1:
                    self._machine.sleep(COOL_DOWN_S * (attempt + 1))
        except EdgekitError as error:
            self._failed[index] = error

    def _trial(self, index: int, subject: RunningSubject, case: Case, repeat: int, attempt: int, process: int) -> Trial:
        machine, watched = self._machine, [subject.process_id]
        canary_before = machine.canary()
        before = machine.usage(watched)
        answers = self._run_requests(index, subject, case, f"{case.name} {repeat} {attempt}")
        after = machine.usage(watched)
        canary_after = machine.canary()
        disturbance = machine.between(before, after)
        return Trial(
            repeat=repeat,
            attempt=attempt,
            process=process,
            requests=tuple(times for together in answers for times in together),
            total_s=after.at_s - before.at_s,
            canary_before=canary_before,
            canary_after=canary_after,
            waited_share=disturbance.waited_share,
            others_share=disturbance.others_share,
            invalid=verdict(canary_before, canary_after, disturbance),
            together=tuple(_together(each) for each in answers) if subject.subject.info.sequences > 1 else (),
        )

    def _run_requests(self, index: int, subject: RunningSubject, case: Case, trial: str) -> list[list[RequestTimes]]:
        """Run the requests of a case in order, each for all users concurrently; return the times [request][user]."""
        times: list[list[RequestTimes]] = []
        users = range(subject.subject.info.sequences)
        histories: list[list[int]] = [[] for _ in users]
        for request in case.requests:
            encode = self._subjects[index].encode
            prompts = [
                tokens_of(of_user(request, user), encode, histories[user] if request.continues else ())
                for user in users
            ]
            answers = subject.run_together(prompts, request.depth_tokens, request.output_tokens, trial)
            for _, written in answers:
                if len(written) != request.output_tokens:
                    raise TargetFailed(
                        f"{subject.subject.info.name}: wrote {len(written)} tokens of {request.output_tokens} "
                        f"in {case.name}"
                    )
            times.append([each for each, _ in answers])
            histories = [tokens + written for tokens, (_, written) in zip(prompts, answers, strict=True)]
        return times

    def _prompt_lengths(self, index: int, case: Case) -> list[int]:
        """Return the number of tokens of each prompt of a case."""
        lengths: list[int] = []
        for request in case.requests:
            before = lengths[-1] + case.requests[len(lengths) - 1].output_tokens if request.continues else 0
            lengths.append(len(tokens_of(request, self._subjects[index].encode, [0] * before)))
        return lengths

    def _refusal(self, index: int, case: Case) -> str | None:
        subject = self._subjects[index]
        info = subject.info
        for request, tokens in zip(case.requests, self._prompt_lengths(index, case), strict=True):
            refused = context_error(
                tokens, request.output_tokens, info.context, info.window, model_limit=subject.model.max_positions
            )
            if refused:
                return refused
        return None

    def _memory(self, index: int, subject: RunningSubject) -> MemoryUse:
        try:
            return subject.memory()
        except EdgekitError as error:
            self._failed.setdefault(index, error)
            return NO_MEMORY

    def _measurement(self, index: int, conditions: Conditions) -> Measurement:
        subject = self._subjects[index]
        report = self._reports.get(index) or SubjectReport(subject.info, NO_MEMORY, subject.predicted, None, ())
        cases = tuple(self._case(index, case, conditions) for case in self._workload.cases)
        status, why = self._status(index, cases)
        return Measurement(
            status=status,
            why=why,
            subject=report.info,
            workload=self._workload.name,
            workload_sha256=self._workload.sha256,
            conditions=conditions,
            load_s=tuple(self._load_s.get(index, ())),
            memory=report.memory,
            predicted=report.predicted,
            cases=cases,
            speculation=report.speculation,
            notes=report.notes,
        )

    def _case(self, index: int, case: Case, conditions: Conditions) -> CaseResult:
        subject = self._subjects[index]
        prompts = self._prompt_lengths(index, case)
        trials = tuple(self._trials.get((index, case.name), ()))
        summary = summaries(trials)
        depth = prompts[-1] + case.requests[-1].output_tokens // 2
        read = bytes_per_token(subject, depth)
        roofline = matrix_share = None
        if "decode_tokens_per_s" in summary and conditions.read_gb_s:
            roofline = read * summary["decode_tokens_per_s"].median / (conditions.read_gb_s * 1e9)
        if "prefill_tokens_per_s" in summary and conditions.fp32_tflops:
            operations = operations_per_token(subject.model) * summary["prefill_tokens_per_s"].median
            matrix_share = operations / (conditions.fp32_tflops * 1e12)
        return CaseResult(
            case=case.name,
            prompt_tokens=tuple(prompts),
            depth_tokens=case.requests[0].depth_tokens,
            refused=self._refusal(index, case),
            trials=trials,
            summary=summary,
            roofline=roofline,
            matrix_share=matrix_share,
            bytes_per_token=read,
        )

    def _status(self, index: int, cases: Sequence[CaseResult]) -> tuple[TrialStatus, str]:
        """Return the status of the whole measurement, and the reason if it is not valid."""
        if index in self._failed:
            return "failed", str(self._failed[index])[:2000]
        ran = [case for case in cases if case.refused is None]
        if not ran:
            return "refused", cases[0].refused or ""
        disturbed = [case for case in ran if not case.summary]
        if not disturbed:
            return "valid", ""
        reasons = [trial.invalid for case in disturbed for trial in case.trials if trial.invalid]
        kind: TrialStatus = "throttled" if reasons and set(reasons) == {"throttled"} else "contended"
        names = ", ".join(case.case for case in disturbed)
        return kind, f"all {len(reasons)} trials of {names} were disturbed; run again on an idle machine"


def _together(requests: Sequence[RequestTimes]) -> Together:
    """Summarise concurrent requests: the slowest one's time is the time of all."""
    seconds = max(request.first_token_s + request.decode_s for request in requests)
    return Together(tokens=sum(request.tokens for request in requests), seconds=seconds)
