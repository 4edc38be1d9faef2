"""Jobs for native runners: a workload as token ids for one artifact, and the check of the runner's answer.

A runner has no tokenizer and reads no plans, so a job carries the tokens and the settings.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from edgekit import Artifact, OpenOptions, open_artifact
from edgekit.apps.bench import (
    ATTEMPTS,
    CONTENDED_SHARE,
    COOL_DOWN_S,
    LOADS,
    THROTTLED,
    Case,
    CaseResult,
    Measurement,
    Predicted,
    SubjectInfo,
    Workload,
    bytes_per_token,
    context_error,
    prompts_of,
    subject_of_artifact,
    summaries,
)
from edgekit.common.base import Frozen
from edgekit.common.bounds import Loads
from edgekit.errors import InvalidInput, Unsupported, WorkloadFailed, quote_short

PROGRAM = "model.pte"
RUNS = {"executorch": ("xnnpack", "vulkan")}  # target → backends that a runner may be built with
_AGREES = 1e-6


class RunnerRequest(Frozen):
    """One request: the tokens that its prompt adds to the conversation."""

    tokens: tuple[int, ...]
    depth: int
    outputs: int
    continues: bool


class RunnerCase(Frozen):
    """Requests that run one after the other, or the reason why they cannot."""

    case: str
    prompt_tokens: tuple[int, ...]
    depth_tokens: int
    refused: str | None
    bytes_per_token: int
    requests: tuple[RunnerRequest, ...]


class RunnerJob(Frozen):
    """Everything that a runner needs besides the artifact's files."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    version: Literal[1] = 1
    artifact_sha256: str
    program: str
    subject: SubjectInfo = Field(alias="arm")
    workload: str
    workload_sha256: str
    predicted: Predicted | None
    threads: Annotated[int, Field(ge=1)]
    chunk_tokens: Annotated[int, Field(ge=1)]
    exact: bool
    warmups: int
    repeats: int
    loads: Loads
    attempts: int
    cool_down_s: float
    contended_share: float
    throttled: float
    cases: tuple[RunnerCase, ...]


def job_of(folder: Path, workload: Workload, *, loads: int = LOADS, exact: bool = False) -> RunnerJob:
    """Return the job of a workload for a runner of the artifact in `folder`."""
    artifact = open_artifact(folder)
    plan = artifact.plan
    if plan.backend not in RUNS.get(plan.target, ()):
        known = ", ".join(f"{target} {backend}" for target, backends in RUNS.items() for backend in backends)
        raise Unsupported(
            f"{folder}: is for {plan.target} {plan.backend}, which no native runner runs; export for one of {known}"
        )
    capacity = plan.storage.capacity_tokens
    if workload.context is not None and workload.context > capacity:
        raise InvalidInput(
            f"{folder}: workload {workload.name} wants {workload.context} tokens of context and the artifact holds "
            f"{capacity}; export with `--context {workload.context}`"
        )
    opening = OpenOptions(context=workload.context, window=workload.window, sinks=workload.sinks, exact=exact)
    subject = subject_of_artifact(folder, opening)
    info = subject.info.model_copy(update={"engine": f"edgekit runner {plan.target} {plan.backend}"})

    def job_case(case: Case) -> RunnerCase:
        given = prompts_of(case, subject.encode)
        prompts = [len(tokens) for _, tokens in given]
        requests = tuple(
            RunnerRequest(
                tokens=tuple(tokens[cached:]),
                depth=request.depth_tokens,
                outputs=request.output_tokens,
                continues=request.continues,
            )
            for request, (cached, tokens) in zip(case.requests, given, strict=True)
        )
        outputs = [request.output_tokens for request in case.requests]
        refused = [_refused(prompt, output, info) for prompt, output in zip(prompts, outputs, strict=True)]
        return RunnerCase(
            case=case.name,
            prompt_tokens=tuple(prompts),
            depth_tokens=case.requests[0].depth_tokens,
            refused=next((why for why in refused if why), None),
            bytes_per_token=bytes_per_token(subject, prompts[-1] + outputs[-1] // 2),
            requests=requests,
        )

    return RunnerJob(
        artifact_sha256=artifact.sha256,
        program=_program(artifact),
        subject=info,
        workload=workload.name,
        workload_sha256=workload.sha256,
        predicted=subject.predicted,
        threads=plan.threads,
        chunk_tokens=plan.chunk_tokens,
        exact=exact,
        warmups=workload.warmups,
        repeats=workload.repeats,
        loads=loads,
        attempts=ATTEMPTS,
        cool_down_s=COOL_DOWN_S,
        contended_share=CONTENDED_SHARE,
        throttled=THROTTLED,
        cases=tuple(job_case(case) for case in workload.cases),
    )


def check_answer(job: RunnerJob, answer: Measurement, who: str) -> Measurement:
    """Return the answer with recomputed summaries. Raises `WorkloadFailed` if it does not match the job."""
    described = answer.subject.model_copy(
        update={"engine_version": job.subject.engine_version, "threads": job.subject.threads}
    )
    if described != job.subject:
        raise WorkloadFailed(
            f"{who}: measured another subject: {quote_short(answer.subject.name)}, {quote_short(answer.subject.engine)}"
        )
    if [case.case for case in answer.cases] != [case.case for case in job.cases]:
        raise WorkloadFailed(f"{who}: answered other cases: {quote_short([case.case for case in answer.cases])}")
    cases = tuple(_check_case(expected, case, who) for expected, case in zip(job.cases, answer.cases, strict=True))
    if answer.status == "valid" and any(case.refused is None and not case.summary for case in cases):
        raise WorkloadFailed(f"{who}: says that it is valid, and a case has no undisturbed trial")
    return answer.model_copy(update={"cases": cases})


def _check_case(expected: RunnerCase, answer: CaseResult, who: str) -> CaseResult:
    answered = (answer.prompt_tokens, answer.depth_tokens, answer.refused, answer.bytes_per_token)
    if answered != (expected.prompt_tokens, expected.depth_tokens, expected.refused, expected.bytes_per_token):
        raise WorkloadFailed(f"{who}: {quote_short(expected.case)}: answered another question: {quote_short(answered)}")
    sizes = [
        (prompt, prompt - request.depth, request.outputs)
        for prompt, request in zip(expected.prompt_tokens, expected.requests, strict=True)
    ]
    for trial in answer.trials:
        made = [(each.prompt_tokens, each.timed_tokens, each.tokens) for each in trial.requests]
        gaps = [len(each.gaps_s) for each in trial.requests]
        if made != sizes or gaps != [tokens - 1 for _, _, tokens in sizes]:
            raise WorkloadFailed(f"{who}: {quote_short(expected.case)}: a trial of other sizes: {quote_short(made)}")
    recomputed = summaries(answer.trials)
    for name in {*recomputed, *answer.summary}:
        one, other = recomputed.get(name), answer.summary.get(name)
        if one is None or other is None or not math.isclose(one.median, other.median, rel_tol=_AGREES):
            raise WorkloadFailed(f"{who}: {quote_short(expected.case)}: its {name} is not that of its own trials")
    return answer.model_copy(update={"summary": recomputed})


def _refused(prompt: int, outputs: int, info: SubjectInfo) -> str | None:
    """Return why a native runner, which never evicts tokens, cannot run a request; None if it can."""
    if info.window is not None and prompt + outputs > info.window:
        return (
            f"{prompt + outputs} tokens pass a window of {info.window}, and a native runner drops none; "
            "measure it on a device that runs `edgekit bench`"
        )
    return context_error(prompt, outputs, info.context, None)


def _program(artifact: Artifact) -> str:
    if PROGRAM not in artifact.manifest.files:
        raise InvalidInput(f"{artifact.folder}: holds no {PROGRAM}; export it again")
    return PROGRAM
