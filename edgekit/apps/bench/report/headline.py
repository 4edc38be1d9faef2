"""The head of a report: one sentence, three figures, and their model, machine and date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgekit.apps.bench.eval.evaluation import Evaluation
from edgekit.apps.bench.measurement import CaseResult, Measurement
from edgekit.apps.bench.report.results import Report
from edgekit.apps.bench.report.tables import number, seconds
from edgekit.apps.bench.statistics import SIGNIFICANT, ShownSummary, differ, shown_summary, values_of
from edgekit.common.units import show_bytes

_MOST_NAMES = 3


class Figure(NamedTuple):
    """One figure of the head, compared with the prediction if there is one."""

    label: str
    value: str
    detail: str


class Headline(NamedTuple):
    """The head of a report; `context` names its models, machines and dates."""

    context: str
    sentence: str
    figures: tuple[Figure, ...]


class _Speed(NamedTuple):
    """The decode speed of one subject in one case."""

    run: Measurement
    case: CaseResult
    decode: ShownSummary


def headline(report: Report) -> Headline:
    """Return the head of a report; parts without data are empty."""
    speeds = _speeds(report.measurements)
    context = context_of(report.measurements, report.evaluations)
    return Headline(context, _sentence(report, speeds), _figures(speeds[0]) if speeds else ())


def context_of(measurements: Sequence[Measurement], evaluations: Sequence[Evaluation] = ()) -> str:
    """Return the models, machines and dates of a report in one line."""
    models = _names([one.subject.model for one in measurements] or [one.model for one in evaluations])
    machines = _names([one.conditions.machine for one in measurements])
    dates = sorted(one.conditions.measured_at[:10] for one in measurements)
    days = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""
    return ", ".join(part for part in (f"{models} on {machines}" if machines else models, days) if part)


def _names(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = f" and {len(unique) - _MOST_NAMES} more" if len(unique) > _MOST_NAMES else ""
    return ", ".join(unique[:_MOST_NAMES]) + more


def _speeds(measurements: Sequence[Measurement]) -> list[_Speed]:
    """Return the subjects' speeds in the first case with data, the fastest undisturbed one first."""
    for first in measurements:
        for case in first.cases:
            speeds = [
                _Speed(one, same, decode)
                for one in measurements
                if one.workload == first.workload
                and (same := one.case(case.case)) is not None
                and (decode := shown_summary(same, "decode_tokens_per_s")) is not None
            ]
            if speeds:
                return sorted(speeds, key=lambda each: (each.decode.is_disturbed, -each.decode.summary.median))
    return []


def _sentence(report: Report, speeds: Sequence[_Speed]) -> str:
    sentences = [_speed_sentence(speeds)] if speeds else []
    failed = [one.subject.name for one in report.measurements if one.status in ("failed", "refused")]
    if failed:
        sentences.append(f"No figures of {_names(failed)}: see the notes.")
    if any(each.decode.is_disturbed for each in speeds):
        sentences.append("Figures marked ~ were disturbed by other programs or heat; run again on an idle machine.")
    if not report.measurements and report.evaluations:
        first = report.evaluations[0]
        if first.divergence is not None:
            same = f"{first.divergence.same_top:.1%}"
            sentences.append(f"{first.recipe} predicts the same next token as {first.reference} in {same} of cases.")
    return " ".join(sentences)


def _speed_sentence(speeds: Sequence[_Speed]) -> str:
    best = speeds[0]
    rate = f"{_mark(best.decode)}{number(best.decode.summary.median)} tokens per second"
    if len(speeds) == 1:
        return f"{best.run.subject.name} decodes {rate}."
    second = speeds[1]
    ratio = best.decode.summary.median / second.decode.summary.median
    chance = differ(values_of(best.case, "decode_tokens_per_s"), values_of(second.case, "decode_tokens_per_s"))
    if best.decode.is_disturbed or second.decode.is_disturbed or chance >= SIGNIFICANT:
        return f"{best.run.subject.name} decodes {rate}; these trials cannot rank it against {second.run.subject.name}."
    return f"{best.run.subject.name} decodes {rate}, {ratio:.2g} times as fast as {second.run.subject.name}."


def _figures(speed: _Speed) -> tuple[Figure, ...]:
    run, case, decode = speed
    predicted, figures = run.predicted, []
    first = shown_summary(case, "first_token_s")
    if first is not None:
        value = f"{_mark(first)}{seconds(first.summary.median)}"
        figures.append(Figure("First token", value, f"after {case.prompt_tokens[0]:,} tokens"))
    value, rate = f"{_mark(decode)}{number(decode.summary.median)}", decode.summary.median
    if predicted is None or predicted.decode_tokens_per_s <= 0:
        figures.append(Figure("Tokens per second", value, "of one request"))
    else:
        share = rate / predicted.decode_tokens_per_s
        detail = f"predicted {number(predicted.decode_tokens_per_s)} ({share - 1:+.0%})"
        figures.append(Figure("Tokens per second", value, detail))
    private = run.memory.anonymous_bytes
    if private is not None and (predicted is None or predicted.private_bytes <= 0):
        figures.append(Figure("Private memory", show_bytes(private), "of the whole process"))
    elif private is not None and predicted is not None:
        share = private / predicted.private_bytes
        most = show_bytes(predicted.private_bytes)
        detail = f"within {most}" if share <= 1 else f"predicted {most} ({share - 1:+.0%})"  # a bound, which may hold
        figures.append(Figure("Private memory", show_bytes(private), detail))
    return tuple(figures)


def _mark(shown: ShownSummary) -> str:
    return "~" if shown.is_disturbed else ""
