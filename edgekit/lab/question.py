"""What a native runner is asked: a workload as tokens of one artifact; and whether its answer is to that question.

A runner has no tokenizer and knows no plans, so this page brings both. Knows nothing of how a runner is reached.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from edgekit.artifact import Artifact, open_artifact
from edgekit.errors import InvalidInput, Unsupported, WorkloadFailed, clip
from edgekit.frozen import Frozen
from edgekit.measure.arms import needs
from edgekit.measure.bench import ATTEMPTS, COOL_DOWN_S, LOADS
from edgekit.measure.entrants import Opening, bytes_per_token, entrant_of
from edgekit.measure.machine import CONTENDED_SHARE, THROTTLED
from edgekit.measure.measurement import Arm, CaseResult, Measurement, Predicted
from edgekit.measure.prompts import tokens_of
from edgekit.measure.statistics import summaries
from edgekit.measure.workload import Case, Workload
from edgekit.runtime.text import read_codec

PROGRAM = "model.pte"
RUNS = {"executorch": ("xnnpack", "vulkan")}  # target → backends that a runner may be built with
_AGREES = 1e-6


class AskedRequest(Frozen):
    """One prompt, as the tokens that are new in it."""

    tokens: tuple[int, ...]
    depth: int
    outputs: int
    continues: bool


class AskedCase(Frozen):
    """Requests that are made one after the other, or why they cannot be."""

    case: str
    prompt_tokens: tuple[int, ...]
    depth_tokens: int
    refused: str | None
    bytes_per_token: int
    requests: tuple[AskedRequest, ...]


class Question(Frozen):
    """Everything that a runner needs to know beside the artifact's own files."""

    version: Literal[1] = 1
    artifact_sha256: str
    program: str
    arm: Arm
    workload: str
    workload_sha256: str
    predicted: Predicted | None
    threads: Annotated[int, Field(ge=1)]
    chunk_tokens: Annotated[int, Field(ge=1)]
    exact: bool
    warmups: int
    repeats: int
    loads: Annotated[int, Field(ge=1, le=100)]
    attempts: int
    cool_down_s: float
    contended_share: float
    throttled: float
    cases: tuple[AskedCase, ...]


def question_of(folder: Path, workload: Workload, *, loads: int = LOADS, exact: bool = False) -> Question:
    """The workload for a runner of the artifact in `folder`."""
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
    opening = Opening(workload.context, workload.window, workload.sinks, exact)
    entrant = entrant_of(folder, opening)
    arm = entrant.arm.model_copy(update={"engine": f"edgekit runner {plan.target} {plan.backend}"})
    codec = read_codec(artifact.folder)

    def encode(text: str, begins: bool) -> list[int]:
        return codec.encode(text, add_special_tokens=begins)

    def asked(case: Case) -> AskedCase:
        requests, prompts = [], list[int]()
        for request in case.requests:
            held = prompts[-1] + case.requests[len(prompts) - 1].output_tokens if request.continues else 0
            tokens = tokens_of(request, encode, [0] * held)
            prompts.append(len(tokens))
            new = tuple(tokens[held:])
            requests.append(
                AskedRequest(
                    tokens=new,
                    depth=request.depth_tokens,
                    outputs=request.output_tokens,
                    continues=request.continues,
                )
            )
        outputs = [request.output_tokens for request in case.requests]
        refused = [_refused(prompt, output, arm) for prompt, output in zip(prompts, outputs, strict=True)]
        return AskedCase(
            case=case.name,
            prompt_tokens=tuple(prompts),
            depth_tokens=case.requests[0].depth_tokens,
            refused=next((why for why in refused if why), None),
            bytes_per_token=bytes_per_token(entrant, plan.model, prompts[-1] + outputs[-1] // 2),
            requests=tuple(requests),
        )

    return Question(
        artifact_sha256=artifact.sha256,
        program=_program(artifact),
        arm=arm,
        workload=workload.name,
        workload_sha256=workload.sha256,
        predicted=entrant.predicted,
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
        cases=tuple(asked(case) for case in workload.cases),
    )


def checked(question: Question, found: Measurement, who: str) -> Measurement:
    """The answer, if it is one to this question, with its summaries made again here; otherwise `WorkloadFailed`."""
    told = found.arm.model_copy(update={"engine_version": question.arm.engine_version, "threads": question.arm.threads})
    if told != question.arm:
        raise WorkloadFailed(f"{who}: measured another arm: {clip(found.arm.name)}, {clip(found.arm.engine)}")
    if [case.case for case in found.cases] != [case.case for case in question.cases]:
        raise WorkloadFailed(f"{who}: answered other cases: {clip([case.case for case in found.cases])}")
    cases = tuple(_checked_case(asked, case, who) for asked, case in zip(question.cases, found.cases, strict=True))
    if found.status == "valid" and any(case.refused is None and not case.summary for case in cases):
        raise WorkloadFailed(f"{who}: says that it is valid, and a case has no undisturbed trial")
    return found.model_copy(update={"cases": cases})


def _checked_case(asked: AskedCase, found: CaseResult, who: str) -> CaseResult:
    said = (found.prompt_tokens, found.depth_tokens, found.refused, found.bytes_per_token)
    if said != (asked.prompt_tokens, asked.depth_tokens, asked.refused, asked.bytes_per_token):
        raise WorkloadFailed(f"{who}: {clip(asked.case)}: answered another question: {clip(said)}")
    wanted = [
        (prompt, prompt - request.depth, request.outputs)
        for prompt, request in zip(asked.prompt_tokens, asked.requests, strict=True)
    ]
    for trial in found.trials:
        made = [(each.prompt_tokens, each.timed_tokens, each.tokens) for each in trial.requests]
        gaps = [len(each.gaps_s) for each in trial.requests]
        if made != wanted or gaps != [tokens - 1 for _, _, tokens in wanted]:
            raise WorkloadFailed(f"{who}: {clip(asked.case)}: a trial of other sizes: {clip(made)}")
    again = summaries(found.trials)
    for name in {*again, *found.summary}:
        one, other = again.get(name), found.summary.get(name)
        if one is None or other is None or not math.isclose(one.median, other.median, rel_tol=_AGREES):
            raise WorkloadFailed(f"{who}: {clip(asked.case)}: its {name} is not that of its own trials")
    return found.model_copy(update={"summary": again})


def _refused(prompt: int, outputs: int, arm: Arm) -> str | None:
    """Why a request cannot be made of a runner, which never drops a token."""
    if arm.window is not None and prompt + outputs > arm.window:
        return (
            f"{prompt + outputs} tokens pass a window of {arm.window}, and a native runner drops none; "
            "measure it on a device that runs `edgekit bench`"
        )
    return needs(prompt, outputs, arm.context, None)


def _program(artifact: Artifact) -> str:
    if PROGRAM not in artifact.manifest.files:
        raise InvalidInput(f"{artifact.folder}: holds no {PROGRAM}; export it again")
    return PROGRAM
