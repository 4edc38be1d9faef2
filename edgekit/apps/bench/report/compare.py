"""Compares two runs of the same workload; a change counts only if it is larger than the spread."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field

from edgekit.apps.bench.measurement import CaseResult, Measurement, Metric
from edgekit.apps.bench.statistics import SIGNIFICANT, differ, summary_of, values_of
from edgekit.common.base import Frozen

COMPARED: tuple[Metric, ...] = ("prefill_tokens_per_s", "decode_tokens_per_s", "first_token_s", "gap_p99_s")
_AT_ONCE: Metric = "together_tokens_per_s"  # only where several requests ran
_MORE_IS_BETTER = {"prefill_tokens_per_s", "decode_tokens_per_s", _AT_ONCE}

Verdict = Literal["better", "worse", "no difference", "inconclusive", "not comparable"]


class Difference(Frozen):
    """The change of one metric of one case."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    subject: str = Field(alias="arm")
    workload: str
    case: str
    metric: str
    before: float | None
    after: float | None
    change: float | None  # after over before, less one
    noise: float | None  # the spreads of both, combined
    chance: float | None  # p-value of the Mann-Whitney test
    verdict: Verdict
    why: str


class Comparison(Frozen):
    """All changes, in the order of the second run."""

    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def is_worse(self) -> bool:
        return any(each.verdict == "worse" for each in self.differences)


def compare_runs(before: Sequence[Measurement], after: Sequence[Measurement]) -> Comparison:
    """Compare two runs by subject name; notes list subjects that only one run has."""
    known = {(one.subject.name, one.workload): one for one in before}
    differences: list[Difference] = []
    notes: list[str] = []
    for one in after:
        other = known.pop((one.subject.name, one.workload), None)
        if other is None:
            notes.append(f"{one.subject.name} on {one.workload}: only in the second run")
            continue
        notes += _notes(other, one)
        differences += _differences(other, one)
    notes += [f"{name} on {workload}: only in the first run" for name, workload in known]
    return Comparison(differences=tuple(differences), notes=tuple(dict.fromkeys(notes)))


def _notes(before: Measurement, after: Measurement) -> Iterator[str]:
    """Yield other changes between the runs, which may explain a difference."""
    name = f"{after.subject.name} on {after.workload}"
    if before.workload_sha256 != after.workload_sha256:
        yield f"{name}: the workload itself changed"
    if before.subject.artifact_sha256 != after.subject.artifact_sha256:
        yield f"{name}: another artifact"
    users, users_after = before.subject.sequences, after.subject.sequences
    if users != users_after:
        yield f"{name}: {users} and {users_after} requests at once; their figures cannot be compared"
    if before.subject.engine_version != after.subject.engine_version:
        yield f"{name}: engine {before.subject.engine_version} → {after.subject.engine_version}"
    one, other = before.conditions, after.conditions
    if one.machine_key != other.machine_key:
        yield f"{name}: another machine; ratios between machines say little about the code"
    if one.power_source != other.power_source:
        yield f"{name}: power {one.power_source or 'unknown'} → {other.power_source or 'unknown'}"
    if one.read_gb_s and other.read_gb_s and abs(other.read_gb_s / one.read_gb_s - 1) > 0.05:
        yield f"{name}: memory was read at {one.read_gb_s:g} and then {other.read_gb_s:g} GB/s"


def _differences(before: Measurement, after: Measurement) -> Iterator[Difference]:
    for case in after.cases:
        old = before.case(case.case)
        if old is None or old.refused or case.refused:
            continue
        comparable = before.workload_sha256 == after.workload_sha256 and old.prompt_tokens == case.prompt_tokens
        for metric in (*COMPARED, _AT_ONCE) if after.subject.sequences > 1 else COMPARED:
            if comparable or values_of(old, metric) or values_of(case, metric):
                yield _difference(after, old, case, metric, comparable)


def _difference(run: Measurement, old: CaseResult, case: CaseResult, metric: Metric, comparable: bool) -> Difference:
    one, other = values_of(old, metric), values_of(case, metric)

    def difference(verdict: Verdict, why: str, **known: float) -> Difference:
        figures: dict[str, Any] = dict.fromkeys(("before", "after", "change", "noise", "chance"))
        return Difference(
            subject=run.subject.name, workload=run.workload, case=case.case, metric=metric, verdict=verdict, why=why,
            **(figures | known),
        )  # fmt: skip

    if not comparable:
        return difference("not comparable", "the two runs had different prompts")
    if not one or not other:
        which = "either run" if not one and not other else "the first run" if not one else "the second run"
        return difference("inconclusive", f"no undisturbed trial in {which}")
    a, b = summary_of(one), summary_of(other)
    change, noise = b.median / a.median - 1, math.hypot(a.spread, b.spread)
    chance = differ(one, other)
    known = {"before": a.median, "after": b.median, "change": change, "noise": noise, "chance": chance}
    if abs(change) <= noise:
        if min(a.count, b.count) < 3:
            return difference("inconclusive", "fewer than three undisturbed trials", **known)
        return difference("no difference", f"{change:+.1%} is within the spread of {noise:.1%}", **known)
    if chance >= SIGNIFICANT:
        return difference(
            "inconclusive", f"{a.count} and {b.count} trials are too few to tell (p = {chance:.2f})", **known
        )
    better = (change > 0) == (metric in _MORE_IS_BETTER)
    why = f"{change:+.1%}, spread {noise:.1%}, p = {chance:.3f}"
    if any(_is_of_one_process(each) for each in (old, case)):
        why += "; all valid trials of a run are from one process, which can be slower as a whole"
    return difference("better" if better else "worse", why, **known)


def _is_of_one_process(case: CaseResult) -> bool:
    return len({trial.process for trial in case.trials if trial.invalid is None}) == 1
