"""A report as text tables, the same on a terminal, in Markdown and in HTML."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from edgekit.apps.bench.eval.evaluation import Evaluation
from edgekit.apps.bench.measurement import CaseResult, Measurement, Metric
from edgekit.apps.bench.report.compare import Comparison
from edgekit.apps.bench.report.results import Report
from edgekit.apps.bench.statistics import shown_summary
from edgekit.common.units import show_bytes

_AT_ONCE, _MATRICES = "all at once tok/s", "of matrix speed"  # columns that few reports have


class Table(NamedTuple):
    """Rows under a head; the first column names the row."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def table_of(title: str, rows: Iterable[Mapping[str, str]], note: str = "", *, optional: Container[str] = ()) -> Table:
    """Return a table of rows, which have their cells by column; columns of `optional` without a cell are left out."""
    cells = list(rows)
    head = [column for column in (cells[0] if cells else ()) if column not in optional or _is_filled(cells, column)]
    return Table(title, tuple(head), tuple(tuple(row[column] for column in head) for row in cells), note)


def _is_filled(rows: Sequence[Mapping[str, str]], column: str) -> bool:
    return any(row[column] for row in rows)


def number(value: float) -> str:
    """Format a number with four significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def size(count: int | None) -> str:
    return "" if count is None else show_bytes(count)


def tables(report: Report, *, brief: bool = False) -> Iterator[Table]:
    """Return the tables of the report that have a row, speed first. `brief`: no memory by class, and no conditions."""
    yield from (table for table in _tables(report, brief) if table.rows)


def _tables(report: Report, brief: bool) -> Iterator[Table]:
    workloads = list(dict.fromkeys(one.workload for one in report.measurements))
    for workload in workloads:
        yield speed_table([one for one in report.measurements if one.workload == workload], workload)
    if any(one.speculation for one in report.measurements):
        yield speculation_table(report.measurements)
    if report.measurements:
        yield memory_table(report.measurements)
        if not brief and any(one.memory.classes for one in report.measurements):
            yield classes_table(report.measurements)
        yield formats_table(report.measurements)
    if report.evaluations:
        yield quality_table(report.evaluations)
    if any(each.tasks for each in report.evaluations):
        yield tasks_table(report.evaluations)
    if not all(each.is_sound for each in report.evaluations):
        yield checks_table(report.evaluations)
    for figures in report.tables:
        yield Table(figures.title, figures.head, figures.rows, figures.source)
    if report.measurements and not brief:
        yield conditions_table(report.measurements)


def speed_table(measurements: Sequence[Measurement], workload: str) -> Table:
    rows = [_speeds(one, case) for one in measurements for case in one.cases]
    note = (
        "Medians; ± is half of the range of undisturbed trials, ~ a median of disturbed ones. Predictions are for the "
        "plan's device, with its cache half full. A gap is the time between two tokens: half of all gaps are "
        "shorter than p50, 99 % are shorter than p99. Of read bandwidth: bytes that decoding read, over what this "
        "machine can read in the same time."
    )
    if _is_filled(rows, _AT_ONCE):
        note += " Decode is of one request; all at once: the tokens of all requests over the time until the last ended."
    if _is_filled(rows, _MATRICES):
        note += (
            " Of matrix speed: operations of prefill without the head, over those of float32 products here in "
            "the same time; kernels for int8 and bfloat16 can exceed it."
        )
    return table_of(f"Speed: {workload}", rows, note, optional=(_AT_ONCE, _MATRICES))


def _speeds(one: Measurement, case: CaseResult) -> dict[str, str]:
    has_run = not case.refused and one.status != "failed"
    ran = case if has_run else case.model_copy(update={"trials": (), "summary": {}, "roofline": None})
    users = one.subject.sequences
    return {
        "subject": one.subject.name,
        "case": case.case,
        "prefill tok/s": _rate(ran, "prefill_tokens_per_s"),
        "decode tok/s": _rate(ran, "decode_tokens_per_s"),
        _AT_ONCE: f"{users}: {_rate(ran, 'together_tokens_per_s')}" if ran.trials and users > 1 else "",
        "predicted": number(one.predicted.decode_tokens_per_s) if one.predicted else "",
        "first token": _time(ran, "first_token_s"),
        "gap p50": _time(ran, "gap_p50_s"),
        "gap p99": _time(ran, "gap_p99_s"),
        "of read bandwidth": _share(ran.roofline),
        _MATRICES: _share(case.matrix_share),
        "trials": _trials(case) if has_run else f"refused: {case.refused}" if case.refused else f"failed: {one.why}",
    }


def _trials(case: CaseResult) -> str:
    """Return the number of valid trials, what disturbed the others, and what drafting and prefixes saved."""
    disturbed = [trial.invalid for trial in case.trials if trial.invalid]
    requests = [request for trial in case.trials for request in trial.requests]
    counted = f"{len(case.trials) - len(disturbed)}" + (f" ({_counts(disturbed)})" if disturbed else "")
    proposed = sum(request.proposed for request in requests)
    if proposed:
        counted += f"; {sum(request.accepted for request in requests) / proposed:.0%} of drafted tokens accepted"
    cached = sum(request.cached_tokens for request in requests)
    if cached:
        counted += f"; {cached / sum(request.prompt_tokens for request in requests):.0%} of prompt tokens were cached"
    return counted


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _counts(disturbed: Sequence[str]) -> str:
    return ", ".join(f"{disturbed.count(kind)} {kind}" for kind in dict.fromkeys(disturbed))


def _rate(case: CaseResult, metric: Metric) -> str:
    shown = shown_summary(case, metric)
    if shown is None:
        return ""
    if shown.is_disturbed:
        return f"~{number(shown.summary.median)} (disturbed)"
    return f"{number(shown.summary.median)} ± {shown.summary.spread / 2:.1%}"


def _time(case: CaseResult, metric: Metric) -> str:
    shown = shown_summary(case, metric)
    return "" if shown is None else f"{'~' if shown.is_disturbed else ''}{seconds(shown.summary.median)}"


def speculation_table(measurements: Sequence[Measurement]) -> Table:
    """Show the final state of drafting with its reason, its speed-up, and the acceptance rate by position."""

    def times(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    rows = [
        {
            "subject": one.subject.name,
            "workload": one.workload,
            "by": kind.name,
            "at the end": "on" if drafting.is_on else "off",
            "accepted": f"{kind.accepted} of {kind.proposed}",
            "by place": " ".join(f"{rate:.2f}" for rate in kind.acceptance),
            "tokens a step": times(drafting.tokens_per_step),
            "estimated speed-up": times(drafting.estimated_speed_up),
            "measured": times(drafting.measured_speed_up),
            "draft memory": size(drafting.draft_bytes),
            "why": drafting.reason,
        }
        for one in measurements
        if (drafting := one.speculation)
        for kind in drafting.proposals
    ]
    return table_of(
        "Drafting",
        rows,
        "By place: the share of first, second, … proposed tokens that were accepted when those before them were. "
        "Speed-up is over plain decoding in the same process, warm-ups and disturbed trials included; of several "
        "processes, the one with the most memory is shown.",
    )


def memory_table(measurements: Sequence[Measurement]) -> Table:
    rows = [
        {
            "subject": one.subject.name,
            "workload": one.workload,
            "private": size(one.memory.anonymous_bytes),
            "predicted private": size(one.predicted.private_bytes if one.predicted else None),
            "against it": _difference(
                one.memory.anonymous_bytes, one.predicted.private_bytes if one.predicted else None
            ),
            "peak": size(one.memory.peak_bytes),
            "predicted total": size(one.predicted.total_bytes if one.predicted else None),
            "PSS": size(one.memory.pss_bytes),
            "load": f"{median(one.load_s):.3g} s" if one.load_s else "",
            "first load": f"{one.load_s[0]:.3g} s" if one.load_s else "",
        }
        for one in measurements
    ]
    counters = ", ".join(dict.fromkeys(one.memory.peak_counter for one in measurements if one.memory.peak_bytes))
    return table_of(
        "Memory and loading",
        rows,
        f"Of the subject's whole process. Private is RssAnon; peak is {counters or 'not known'} and includes mapped "
        "files of libraries, which the predicted total does not. Predictions are of the artifact as it was opened. "
        "A first load may pack weights for this processor.",
    )


def _difference(measured: int | None, predicted: int | None) -> str:
    if not measured or not predicted:
        return ""
    return "within" if measured <= predicted else f"{measured / predicted - 1:+.0%}"


def classes_table(measurements: Sequence[Measurement]) -> Table:
    """Show predicted and measured memory by class."""
    rows = [
        {
            "subject": one.subject.name,
            "workload": one.workload,
            "class": each.name,
            "predicted": show_bytes(each.predicted_bytes),
            "measured": "not known separately" if each.measured_bytes is None else show_bytes(each.measured_bytes),
            "at most": "" if each.most_bytes is None else show_bytes(each.most_bytes),
        }
        for one in measurements
        for each in one.memory.classes
        if each.predicted_bytes or each.measured_bytes
    ]
    note = "Measured when all requests had ended and caches were empty again; at most: the largest size of a cache."
    return table_of("Memory by class", rows, note)


def formats_table(measurements: Sequence[Measurement]) -> Table:
    """Describe the subjects' formats in detail, because "4-bit" alone says too little."""
    rows = {}
    first = next((one.subject.weights_sha256 for one in measurements if one.subject.weights_sha256), None)
    for one in measurements:
        info = one.subject
        is_same = info.formats.same_integers and info.weights_sha256 in (None, first)
        engine = f"{info.engine} {info.engine_version}".strip()
        engine += f", draft {info.draft}" if info.draft else ""
        engine += f", {info.sequences} requests at once" if info.sequences > 1 else ""
        engine += f", prefixes up to {show_bytes(info.prefix_bytes)}" if info.prefix_bytes else ""
        kept = f"window {info.window}, {info.sinks} sinks" if info.window else f"{info.context:,} tokens"
        kept += f", by {info.keep}" if info.keep else ""
        rows[info.name] = {
            "subject": info.name,
            "engine": engine,
            "model": info.model,
            "linears": info.formats.linears,
            "embedding": info.formats.embedding,
            "head": info.formats.head,
            "bits a weight": f"{info.formats.bits_per_weight:g}",
            "files": show_bytes(info.formats.file_bytes),
            "cache": f"{kept}, {info.kv_bits} bit" if info.kv_bits else kept,
            "threads": str(info.threads),
            "same integers": {True: "yes", False: "no", None: "not compared"}[is_same],
        }
    return table_of(
        "Subjects",
        rows.values(),
        "Same integers: the weights are those of the first artifact, bit for bit, so that only the engines differ.",
    )


def quality_table(evaluations: Sequence[Evaluation]) -> Table:
    rows = []
    for one in evaluations:
        divergence = one.divergence
        if divergence is None:
            continue
        rows.append(
            {
                "artifact": f"{one.target} {one.backend} {one.recipe}",
                "KL": f"{divergence.kl_mean:.3g} ± {divergence.kl_error:.1g}",
                "median": f"{divergence.kl_median:.3g}",
                "99.9 %": f"{divergence.kl_p999:.3g}",
                "max": f"{divergence.kl_max:.3g}",
                "same top token": f"{divergence.same_top:.2%} ± {divergence.same_top_error:.2%}",
                "perplexity": f"{divergence.perplexity:.4g}",
                "of the reference": f"{divergence.reference_perplexity:.4g}",
                "ln ratio": f"{divergence.log_ratio:+.4f} ± {divergence.log_ratio_error:.4f}",
                "bits a weight": f"{one.bits_per_weight:g}",
                "files": show_bytes(one.file_bytes),
            }
        )
    first = evaluations[0]
    counted = f"{first.divergence.tokens:,} tokens of " if first.divergence else ""
    return table_of(
        "Quality",
        rows,
        f"{counted}{first.text}, windows of {first.window_tokens}, against {first.reference}. ± is one standard error, "
        "paired where two models are compared.",
    )


def tasks_table(evaluations: Sequence[Evaluation]) -> Table:
    rows = [
        {
            "artifact": f"{one.target} {one.backend} {one.recipe}",
            "kind": task.kind,
            "right": f"{task.right} of {task.asked}",
            "share": f"{task.share:.1%} ± {task.error:.1%}",
            "first failure": task.failures[0] if task.failures else "",
        }
        for one in evaluations
        for task in one.tasks
    ]
    return table_of("Tasks", rows)


def checks_table(evaluations: Sequence[Evaluation]) -> Table:
    rows = [
        {
            "artifact": f"{one.target} {one.backend} {one.recipe}",
            "what": check.what,
            "": "same" if check.same else "DIFFERS",
            "difference": check.detail,
        }
        for one in evaluations
        if not one.is_sound
        for check in one.checks
    ]
    return table_of("Text to tokens", rows)


def conditions_table(measurements: Sequence[Measurement]) -> Table:
    """Show the conditions, one run per row; columns that no machine reports are left out."""
    rows = [
        {
            "workload": one.workload,
            "measured at (UTC)": now.measured_at.replace("T", " ").removesuffix("Z"),
            "machine": f"{now.machine}, {now.cores} cores, {size(now.ram_bytes)}",
            "system": now.os,
            "load average": f"{now.load_average:g}" if now.load_average is not None else "",
            "power": now.power_source or "",
            "temperature": f"{now.temperature_c:g} °C" if now.temperature_c is not None else "",
            "core frequency": f"{now.frequency_mhz:g} MHz" if now.frequency_mhz is not None else "",
            "memory read before": f"{now.read_gb_s:g} GB/s" if now.read_gb_s else "",
            "after": f"{now.read_gb_s_after:g} GB/s" if now.read_gb_s_after else "",
            "versions": ", ".join(f"{name} {version}" for name, version in now.versions.items()),
        }
        for one in measurements
        for now in (one.conditions,)
    ]
    missing = [column for column in rows[0] if not _is_filled(rows, column)]
    note = f"Not reported by this machine: {', '.join(missing)}." if missing else ""
    different = [row for place, row in enumerate(rows) if row not in rows[:place]]
    return table_of("Conditions", different, note, optional=missing)


def notes_of(report: Report) -> tuple[str, ...]:
    """Return the notes, each once with its subjects."""
    subjects: dict[str, list[str]] = {}
    for one in report.measurements:
        if one.status != "valid":
            subjects.setdefault(f"{one.status}: {one.why}", []).append(f"{one.subject.name}, {one.workload}")
        for note in one.notes:
            subjects.setdefault(note, []).append(one.subject.name)
    for each in report.evaluations:
        for note in each.notes:
            subjects.setdefault(note, []).append(f"{each.target} {each.recipe}")
    every = len({one.subject.name for one in report.measurements})
    notes = list(report.notes)
    for note, named in subjects.items():
        names = list(dict.fromkeys(named))
        notes.append(note if len(names) == every > 1 else f"{'; '.join(names)}: {note}")
    return tuple(dict.fromkeys(notes))


def differences_table(comparison: Comparison) -> Table:
    rows = [
        (
            f"{each.subject}, {each.workload}",
            each.case,
            each.metric,
            "" if each.before is None else f"{each.before:.4g}",
            "" if each.after is None else f"{each.after:.4g}",
            each.verdict,
            each.why,
        )
        for each in comparison.differences
    ]
    return Table("Before and after", ("subject", "case", "metric", "before", "after", "verdict", "why"), tuple(rows))
