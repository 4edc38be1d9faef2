"""A report as text tables, the same on a terminal, in Markdown and in HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from edgekit.apps.bench.eval.evaluation import Evaluation
from edgekit.apps.bench.measurement import CaseResult, Measurement, Metric
from edgekit.apps.bench.report.compare import Comparison
from edgekit.apps.bench.report.results import Report
from edgekit.apps.bench.statistics import median, shown_summary
from edgekit.common.units import show_bytes


class Table(NamedTuple):
    """Rows under a head; the first column names the row."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def number(value: float) -> str:
    """Format a number with four significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def size(count: int | None) -> str:
    return "" if count is None else show_bytes(count)


def tables(report: Report, *, brief: bool = False) -> Iterator[Table]:
    """Return every table of the report, speed first. `brief`: without memory by class and conditions."""
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
    rows = []
    for one in measurements:
        for case in one.cases:
            rows.append((f"{one.subject.name}", case.case, *_speeds(one, case)))
    head: tuple[str, ...] = (
        "subject", "case", "prefill tok/s", "decode tok/s", "predicted", "first token", "gap p50", "gap p99",
        "of read bandwidth", "trials",
    )  # fmt: skip
    note = (
        "Medians; ± is half of the range of undisturbed trials, ~ a median of disturbed ones. Predictions are for the "
        "plan's device, with its cache half full. A gap is the time between two tokens: half of all gaps are "
        "shorter than p50, 99 % are shorter than p99. Of read bandwidth: bytes that decoding read, over what this "
        "machine can read in the same time."
    )
    if any(one.subject.sequences > 1 for one in measurements):
        pairs = [(one, case) for one in measurements for case in one.cases]
        head = (*head[:4], "all at once tok/s", *head[4:])
        rows = [(*row[:4], _at_once(*pair), *row[4:]) for row, pair in zip(rows, pairs, strict=True)]
        note += " Decode is of one request; all at once: the tokens of all requests over the time until the last ended."
    if any(case.matrix_share is not None for one in measurements for case in one.cases):
        shares = [_share(case.matrix_share) for one in measurements for case in one.cases]
        head = (*head[:-1], "of matrix speed", head[-1])
        rows = [(*row[:-1], share, row[-1]) for row, share in zip(rows, shares, strict=True)]
        note += (
            " Of matrix speed: operations of prefill without the head, over those of float32 products here in "
            "the same time; kernels for int8 and bfloat16 can exceed it."
        )
    return Table(f"Speed: {workload}", head, tuple(rows), note)


def _at_once(one: Measurement, case: CaseResult) -> str:
    ran = case.trials and one.status != "failed" and not case.refused
    return (
        f"{one.subject.sequences}: {_rate(case, 'together_tokens_per_s')}" if ran and one.subject.sequences > 1 else ""
    )


def _speeds(one: Measurement, case: CaseResult) -> tuple[str, ...]:
    predicted = number(one.predicted.decode_tokens_per_s) if one.predicted else ""
    if case.refused or one.status == "failed":
        why = case.refused or one.why
        return ("", "", predicted, "", "", "", "", f"refused: {why}" if case.refused else f"failed: {why}")
    disturbed = [trial.invalid for trial in case.trials if trial.invalid]
    valid = len(case.trials) - len(disturbed)
    counted = f"{valid}" + (f" ({_counts(disturbed)})" if disturbed else "")
    proposed = sum(request.proposed for trial in case.trials for request in trial.requests)
    if proposed:
        accepted = sum(request.accepted for trial in case.trials for request in trial.requests)
        counted += f"; {accepted / proposed:.0%} of drafted tokens accepted"
    cached = sum(request.cached_tokens for trial in case.trials for request in trial.requests)
    if cached:
        prompts = sum(request.prompt_tokens for trial in case.trials for request in trial.requests)
        counted += f"; {cached / prompts:.0%} of prompt tokens were cached"
    return (
        _rate(case, "prefill_tokens_per_s"),
        _rate(case, "decode_tokens_per_s"),
        predicted,
        _time(case, "first_token_s"),
        _time(case, "gap_p50_s"),
        _time(case, "gap_p99_s"),
        _share(case.roofline),
        counted,
    )


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
        (
            one.subject.name,
            one.workload,
            kind.name,
            "on" if drafting.is_on else "off",
            f"{kind.accepted} of {kind.proposed}",
            " ".join(f"{rate:.2f}" for rate in kind.acceptance),
            times(drafting.tokens_per_step),
            times(drafting.estimated_speed_up),
            times(drafting.measured_speed_up),
            size(drafting.draft_bytes),
            drafting.reason,
        )
        for one in measurements
        if (drafting := one.speculation)
        for kind in drafting.proposals
    ]
    return Table(
        "Drafting",
        ("subject", "workload", "by", "at the end", "accepted", "by place", "tokens a step", "estimated speed-up",
         "measured", "draft memory", "why"),
        tuple(rows),
        "By place: the share of first, second, … proposed tokens that were accepted when those before them were. "
        "Speed-up is over plain decoding in the same process, warm-ups and disturbed trials included; of several "
        "processes, the one with the most memory is shown.",
    )  # fmt: skip


def memory_table(measurements: Sequence[Measurement]) -> Table:
    rows = [
        (
            one.subject.name,
            one.workload,
            size(one.memory.anonymous_bytes),
            size(one.predicted.private_bytes if one.predicted else None),
            _difference(one.memory.anonymous_bytes, one.predicted.private_bytes if one.predicted else None),
            size(one.memory.peak_bytes),
            size(one.predicted.total_bytes if one.predicted else None),
            size(one.memory.pss_bytes),
            f"{median(one.load_s):.3g} s" if one.load_s else "",
            f"{one.load_s[0]:.3g} s" if one.load_s else "",
        )
        for one in measurements
    ]
    counters = ", ".join(dict.fromkeys(one.memory.peak_counter for one in measurements if one.memory.peak_bytes))
    return Table(
        "Memory and loading",
        ("subject", "workload", "private", "predicted private", "against it", "peak", "predicted total", "PSS", "load",
         "first load"),
        tuple(rows),
        f"Of the subject's whole process. Private is RssAnon; peak is {counters or 'not known'} and includes mapped "
        "files of libraries, which the predicted total does not. Predictions are of the artifact as it was opened. "
        "A first load may pack weights for this processor.",
    )  # fmt: skip


def _difference(measured: int | None, predicted: int | None) -> str:
    if not measured or not predicted:
        return ""
    return "within" if measured <= predicted else f"{measured / predicted - 1:+.0%}"


def classes_table(measurements: Sequence[Measurement]) -> Table:
    """Show predicted and measured memory by class."""
    rows = [
        (
            one.subject.name,
            one.workload,
            each.name,
            show_bytes(each.predicted_bytes),
            "not known separately" if each.measured_bytes is None else show_bytes(each.measured_bytes),
            "" if each.most_bytes is None else show_bytes(each.most_bytes),
        )
        for one in measurements
        for each in one.memory.classes
        if each.predicted_bytes or each.measured_bytes
    ]
    head = ("subject", "workload", "class", "predicted", "measured", "at most")
    note = "Measured when all requests had ended and caches were empty again; at most: the largest size of a cache."
    return Table("Memory by class", head, tuple(rows), note)


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
        rows[info.name] = (
            info.name,
            engine,
            info.model,
            info.formats.linears,
            info.formats.embedding,
            info.formats.head,
            f"{info.formats.bits_per_weight:g}",
            show_bytes(info.formats.file_bytes),
            f"{kept}, {info.kv_bits} bit" if info.kv_bits else kept,
            str(info.threads),
            {True: "yes", False: "no", None: "not compared"}[is_same],
        )
    return Table(
        "Subjects",
        ("subject", "engine", "model", "linears", "embedding", "head", "bits a weight", "files", "cache",
         "threads", "same integers"),
        tuple(rows.values()),
        "Same integers: the weights are those of the first artifact, bit for bit, so that only the engines differ.",
    )  # fmt: skip


def quality_table(evaluations: Sequence[Evaluation]) -> Table:
    rows = []
    for one in evaluations:
        divergence = one.divergence
        if divergence is None:
            continue
        rows.append(
            (
                f"{one.target} {one.backend} {one.recipe}",
                f"{divergence.kl_mean:.3g} ± {divergence.kl_error:.1g}",
                f"{divergence.kl_median:.3g}",
                f"{divergence.kl_p999:.3g}",
                f"{divergence.kl_max:.3g}",
                f"{divergence.same_top:.2%} ± {divergence.same_top_error:.2%}",
                f"{divergence.perplexity:.4g}",
                f"{divergence.reference_perplexity:.4g}",
                f"{divergence.log_ratio:+.4f} ± {divergence.log_ratio_error:.4f}",
                f"{one.bits_per_weight:g}",
                show_bytes(one.file_bytes),
            )
        )
    first = evaluations[0]
    counted = f"{first.divergence.tokens:,} tokens of " if first.divergence else ""
    return Table(
        "Quality",
        ("artifact", "KL", "median", "99.9 %", "max", "same top token", "perplexity",
         "of the reference", "ln ratio", "bits a weight", "files"),
        tuple(rows),
        f"{counted}{first.text}, windows of {first.window_tokens}, against {first.reference}. ± is one standard error, "
        "paired where two models are compared.",
    )  # fmt: skip


def tasks_table(evaluations: Sequence[Evaluation]) -> Table:
    rows = [
        (
            f"{one.target} {one.backend} {one.recipe}",
            task.kind,
            f"{task.right} of {task.asked}",
            f"{task.share:.1%} ± {task.error:.1%}",
            task.failures[0] if task.failures else "",
        )
        for one in evaluations
        for task in one.tasks
    ]
    return Table("Tasks", ("artifact", "kind", "right", "share", "first failure"), tuple(rows))


def checks_table(evaluations: Sequence[Evaluation]) -> Table:
    rows = [
        (f"{one.target} {one.backend} {one.recipe}", check.what, "same" if check.same else "DIFFERS", check.detail)
        for one in evaluations
        if not one.is_sound
        for check in one.checks
    ]
    return Table("Text to tokens", ("artifact", "what", "", "difference"), tuple(rows))


def conditions_table(measurements: Sequence[Measurement]) -> Table:
    """Show the conditions, one run per row; columns that no machine reports are left out."""
    head = (
        "workload", "measured at (UTC)", "machine", "system", "load average", "power", "temperature", "core frequency",
        "memory read before", "after", "versions",
    )  # fmt: skip
    rows: dict[tuple[str, ...], None] = {}
    for one in measurements:
        now = one.conditions
        rows[
            one.workload,
            now.measured_at.replace("T", " ").removesuffix("Z"),
            f"{now.machine}, {now.cores} cores, {size(now.ram_bytes)}",
            now.os,
            f"{now.load_average:g}" if now.load_average is not None else "",
            now.power_source or "",
            f"{now.temperature_c:g} °C" if now.temperature_c is not None else "",
            f"{now.frequency_mhz:g} MHz" if now.frequency_mhz is not None else "",
            f"{now.read_gb_s:g} GB/s" if now.read_gb_s else "",
            f"{now.read_gb_s_after:g} GB/s" if now.read_gb_s_after else "",
            ", ".join(f"{name} {version}" for name, version in now.versions.items()),
        ] = None
    kept = [place for place in range(len(head)) if any(row[place] for row in rows)]
    missing = [head[place] for place in range(len(head)) if place not in kept]
    return Table(
        "Conditions",
        tuple(head[place] for place in kept),
        tuple(tuple(row[place] for place in kept) for row in rows),
        f"Not reported by this machine: {', '.join(missing)}." if missing else "",
    )


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
