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
from edgekit.apps.bench.prompts import of_user, prompts_of, tokens_of
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


class SubjectRun:
    """One subject of a run: its prompts, and what its processes and trials told."""

    def __init__(self, subject: Subject, workload: Workload) -> None:
        self.subject, self._workload = subject, workload
        self.running: RunningSubject | None = None
        self.failed: EdgekitError | None = None
        self.load_s: list[float] = []
        self.trials: dict[str, list[Trial]] = {case.name: [] for case in workload.cases}
        self._report: SubjectReport | None = None
        self._prompts = {
            case.name: [len(tokens) for _, tokens in prompts_of(case, subject.encode)] for case in workload.cases
        }
        self.refused = {case.name: self._refusal(case) for case in workload.cases}

    def _refusal(self, case: Case) -> str | None:
        info, most = self.subject.info, self.subject.model.max_positions
        found = (
            context_error(tokens, request.output_tokens, info.context, info.window, model_limit=most)
            for request, tokens in zip(case.requests, self._prompts[case.name], strict=True)
        )
        return next((refused for refused in found if refused), None)

    def open(self, stack: ExitStack) -> None:
        """Open a fresh process until the stack is closed."""
        self.running = None
        if self.failed is None:
            try:
                self.running = stack.enter_context(RunningSubject(self.subject))
                self.load_s.append(self.running.load_s)
            except EdgekitError as error:
                self.failed = error

    def collect(self) -> None:
        """Collect the report of the process at its end; keep the report with the highest peak memory."""
        if self.running is None:
            return
        try:
            memory = self.running.memory()
        except EdgekitError as error:
            self.failed, memory = self.failed or error, NO_MEMORY
        before, running = self._report, self.running
        notes = (*(before.notes if before else ()), *running.opened.get("notes", ()))
        report = SubjectReport(running.info(), memory, running.predicted, running.speculation, ())
        if before is not None and (memory.peak_bytes or 0) <= (before.memory.peak_bytes or 0):
            report = before
        self._report = report._replace(notes=tuple(dict.fromkeys(notes)))

    def requests(self, case: Case, trial: str) -> list[list[RequestTimes]]:
        """Run the requests of a case in order, each for all users concurrently; return the times [request][user]."""
        assert self.running is not None
        times: list[list[RequestTimes]] = []
        users = range(self.subject.info.sequences)
        histories: list[list[int]] = [[] for _ in users]
        for request in case.requests:
            prompts = [
                tokens_of(of_user(request, user), self.subject.encode, histories[user] if request.continues else ())
                for user in users
            ]
            answers = self.running.run_together(prompts, request.depth_tokens, request.output_tokens, trial)
            for _, written in answers:
                if len(written) != request.output_tokens:
                    raise TargetFailed(
                        f"{self.subject.info.name}: wrote {len(written)} tokens of {request.output_tokens} "
                        f"in {case.name}"
                    )
            times.append([each for each, _ in answers])
            histories = [tokens + written for tokens, (_, written) in zip(prompts, answers, strict=True)]
        return times

    def measurement(self, conditions: Conditions) -> Measurement:
        subject = self.subject
        report = self._report or SubjectReport(subject.info, NO_MEMORY, subject.predicted, None, ())
        cases = tuple(self._case(case, conditions) for case in self._workload.cases)
        status, why = self._status(cases)
        return Measurement(
            status=status,
            why=why,
            subject=report.info,
            workload=self._workload.name,
            workload_sha256=self._workload.sha256,
            conditions=conditions,
            load_s=tuple(self.load_s),
            memory=report.memory,
            predicted=report.predicted,
            cases=cases,
            speculation=report.speculation,
            notes=report.notes,
        )

    def _case(self, case: Case, conditions: Conditions) -> CaseResult:
        prompts, trials = self._prompts[case.name], tuple(self.trials[case.name])
        summary = summaries(trials)
        read = bytes_per_token(self.subject, prompts[-1] + case.requests[-1].output_tokens // 2)
        roofline = matrix_share = None
        if "decode_tokens_per_s" in summary and conditions.read_gb_s:
            roofline = read * summary["decode_tokens_per_s"].median / (conditions.read_gb_s * 1e9)
        if "prefill_tokens_per_s" in summary and conditions.fp32_tflops:
            operations = operations_per_token(self.subject.model) * summary["prefill_tokens_per_s"].median
            matrix_share = operations / (conditions.fp32_tflops * 1e12)
        return CaseResult(
            case=case.name,
            prompt_tokens=tuple(prompts),
            depth_tokens=case.requests[0].depth_tokens,
            refused=self.refused[case.name],
            trials=trials,
            summary=summary,
            roofline=roofline,
            matrix_share=matrix_share,
            bytes_per_token=read,
        )

    def _status(self, cases: Sequence[CaseResult]) -> tuple[TrialStatus, str]:
        """Return the status of the whole measurement, and the reason if it is not valid."""
        if self.failed is not None:
            return "failed", str(self.failed)[:2000]
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
        self._runs = [SubjectRun(subject, workload) for subject in subjects]
        self._workload, self._machine = workload, machine
        self._conditions, self._loads, self._progress = conditions, loads, progress
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
        return [each.measurement(conditions) for each in self._runs]

    def _run_processes(self, process: int) -> None:
        """Open every subject in a fresh process and run this process's share of the repeats."""
        work, loads = self._workload, self._loads
        share = [repeat for repeat in range(work.repeats) if repeat * loads // work.repeats == process]
        with ExitStack() as stack:
            for each in self._runs:
                self._report_progress(f"opening: {each.subject.info.name}")
                each.open(stack)
            if not share:
                return  # more processes than repeats: only opening is measured
            for repeat in (*range(-work.warmups, 0), *share):
                for case in work.cases:
                    # Subjects take turns; the first one changes from repeat to repeat.
                    for each in self._runs[:: -1 if repeat % 2 else 1]:
                        if each.running is not None and each.failed is None and each.refused[case.name] is None:
                            self._step(each, case, repeat, process)
                        self._done += 1
                        self._report_progress(f"{work.name}: {each.subject.info.name}, {case.name}")
            for each in self._runs:
                each.collect()

    def _report_progress(self, what: str) -> None:
        work = self._workload
        warmups = work.warmups * min(self._loads, work.repeats)
        self._progress(self._done, len(self._runs) * len(work.cases) * (work.repeats + warmups), what)

    def _step(self, run: SubjectRun, case: Case, repeat: int, process: int) -> None:
        """Run one repeat of a case; a warm-up if `repeat` is negative."""
        try:
            if repeat < 0:
                run.requests(case, f"warm-up {repeat}")
                return
            attempts = ATTEMPTS if self._disturbed_in_a_row < BUSY_AFTER else 1
            for attempt in range(attempts):
                trial = self._trial(run, case, repeat, attempt, process)
                run.trials[case.name].append(trial)
                if trial.invalid is None:
                    self._disturbed_in_a_row = 0
                    return
                self._disturbed_in_a_row += 1
                if attempt < attempts - 1:
                    self._machine.sleep(COOL_DOWN_S * (attempt + 1))
        except EdgekitError as error:
            run.failed = error

    def _trial(self, run: SubjectRun, case: Case, repeat: int, attempt: int, process: int) -> Trial:
        assert run.running is not None
        machine, watched = self._machine, [run.running.process_id]
        canary_before = machine.canary()
        before = machine.usage(watched)
        answers = run.requests(case, f"{case.name} {repeat} {attempt}")
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
            together=tuple(_together(each) for each in answers) if run.subject.info.sequences > 1 else (),
        )


def _together(requests: Sequence[RequestTimes]) -> Together:
    """Summarise concurrent requests: the slowest one's time is the time of all."""
    seconds = max(request.first_token_s + request.decode_s for request in requests)
    return Together(tokens=sum(request.tokens for request in requests), seconds=seconds)
