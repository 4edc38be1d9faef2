"""A report as tables of plain words, which the terminal, Markdown and HTML all show alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from edgekit.measure.compare import Comparison
from edgekit.measure.evaluation import Evaluation
from edgekit.measure.measurement import CaseResult, Measurement, Metric, Summary
from edgekit.measure.results import Report
from edgekit.measure.statistics import METRICS, median
from edgekit.units import show_bytes


class Table(NamedTuple):
    """Rows under a head; the first column names the row."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables(report: Report) -> Iterator[Table]:
    """Everything that the report holds, best known first."""
    workloads = list(dict.fromkeys(one.workload for one in report.measurements))
    for workload in workloads:
        yield speed_table([one for one in report.measurements if one.workload == workload], workload)
    if any(one.speculation for one in report.measurements):
        yield speculation_table(report.measurements)
    if report.measurements:
        yield memory_table(report.measurements)
        if any(one.memory.classes for one in report.measurements):
            yield classes_table(report.measurements)
        yield formats_table(report.measurements)
    if report.evaluations:
        yield quality_table(report.evaluations)
    if any(each.tasks for each in report.evaluations):
        yield tasks_table(report.evaluations)
    if not all(each.is_sound for each in report.evaluations):
        yield checks_table(report.evaluations)
    if report.points:
        yield points_table(report)
    for figures in report.tables:
        yield Table(figures.title, figures.head, figures.rows, figures.source)
    if report.measurements:
        yield conditions_table(report.measurements)


def speed_table(measurements: Sequence[Measurement], workload: str) -> Table:
    rows = []
    for one in measurements:
        for case in one.cases:
            rows.append((f"{one.arm.name}", case.case, *_speeds(one, case)))
    head: tuple[str, ...] = (
        "arm", "case", "prefill tok/s", "decode tok/s", "predicted", "first token", "gap p50", "gap p99",
        "of read bandwidth", "trials",
    )  # fmt: skip
    note = (
        "Medians; ± is half of the range of all undisturbed trials. "
        "Predictions are for the device of the plan, with its cache half full."
    )
    if any(one.arm.sequences > 1 for one in measurements):
        pairs = [(one, case) for one in measurements for case in one.cases]
        head = (*head[:4], "all at once tok/s", *head[4:])
        rows = [(*row[:4], _at_once(*pair), *row[4:]) for row, pair in zip(rows, pairs, strict=True)]
        note += " Decode is of one request; all at once: what all wrote over the time from asking to the last end."
    return Table(f"Speed: {workload}", head, tuple(rows), note)


def _at_once(one: Measurement, case: CaseResult) -> str:
    ran = case.trials and one.status != "failed" and not case.refused
    return f"{one.arm.sequences}: {_rate(case, 'together_tokens_per_s')}" if ran and one.arm.sequences > 1 else ""


def _speeds(one: Measurement, case: CaseResult) -> tuple[str, ...]:
    predicted = f"{one.predicted.decode_tokens_per_s:g}" if one.predicted else ""
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
    known = sum(request.cached_tokens for trial in case.trials for request in trial.requests)
    if known:
        asked = sum(request.prompt_tokens for trial in case.trials for request in trial.requests)
        counted += f"; {known / asked:.0%} of prompt tokens known before"
    found = case.summary
    return (
        _rate(case, "prefill_tokens_per_s"),
        _rate(case, "decode_tokens_per_s"),
        predicted,
        _time(found.get("first_token_s")),
        _time(found.get("gap_p50_s")),
        _time(found.get("gap_p99_s")),
        f"{case.roofline:.0%}" if case.roofline is not None else "",
        counted,
    )


def _counts(disturbed: Sequence[str]) -> str:
    return ", ".join(f"{disturbed.count(kind)} {kind}" for kind in dict.fromkeys(disturbed))


def _rate(case: CaseResult, metric: Metric) -> str:
    found = case.summary.get(metric)
    if found is None:
        values = [value for trial in case.trials if (value := METRICS[metric](trial)) is not None]
        return f"disturbed (≥ {max(values):.3g})" if values else "disturbed"
    return f"{found.median:.4g} ± {found.spread / 2:.1%}"


def _time(found: Summary | None) -> str:
    if found is None:
        return ""
    return f"{found.median * 1000:.3g} ms" if found.median < 1 else f"{found.median:.3g} s"


def speculation_table(measurements: Sequence[Measurement]) -> Table:
    """Whether drafting was on at the end and why, what it gained, and how often proposals were right, by place."""

    def times(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    rows = [
        (
            one.arm.name,
            one.workload,
            kind.name,
            "on" if found.is_on else "off",
            f"{kind.accepted} of {kind.proposed}",
            " ".join(f"{rate:.2f}" for rate in kind.acceptance),
            times(found.tokens_per_step),
            times(found.estimated_speed_up),
            times(found.measured_speed_up),
            _size(found.draft_bytes),
            found.reason,
        )
        for one in measurements
        if (found := one.speculation)
        for kind in found.proposals
    ]
    return Table(
        "Drafting",
        ("arm", "workload", "by", "at the end", "accepted", "by place", "tokens a step", "estimated speed-up",
         "measured", "draft memory", "why"),
        tuple(rows),
        "By place: how often the first, second, … proposed token was right, those before it being right. Speed-up is "
        "over plain decoding in the same process, warm-ups and disturbed trials included; of several processes, the "
        "one that took most memory.",
    )  # fmt: skip


def memory_table(measurements: Sequence[Measurement]) -> Table:
    rows = []
    for one in measurements:
        use, predicted = one.memory, one.predicted
        error = (
            f"{use.peak_bytes / predicted.total_bytes - 1:+.0%}"
            if predicted and predicted.total_bytes and use.peak_bytes
            else ""
        )
        rows.append(
            (
                one.arm.name,
                one.workload,
                _size(use.peak_bytes),
                _size(predicted.total_bytes if predicted else None),
                error,
                _size(use.anonymous_bytes),
                _size(predicted.private_bytes if predicted else None),
                _size(use.pss_bytes),
                f"{median(one.load_s):.3g} s" if one.load_s else "",
                f"{one.load_s[0]:.3g} s" if one.load_s else "",
            )
        )
    counters = ", ".join(dict.fromkeys(one.memory.peak_counter for one in measurements if one.memory.peak_bytes))
    return Table(
        "Memory and loading",
        ("arm", "workload", "peak", "predicted", "off by", "private", "predicted private", "PSS", "load", "first load"),
        tuple(rows),
        f"Peak is {counters or 'not known'}, of the arm's whole process; private is RssAnon. Predictions are of the "
        "artifact as it was opened. A first load may pack weights for this processor.",
    )


def classes_table(measurements: Sequence[Measurement]) -> Table:
    """Where the memory went, predicted beside measured."""
    rows = [
        (
            one.arm.name,
            one.workload,
            each.name,
            show_bytes(each.predicted_bytes),
            "not told apart here" if each.measured_bytes is None else show_bytes(each.measured_bytes),
            "" if each.most_bytes is None else show_bytes(each.most_bytes),
        )
        for one in measurements
        for each in one.memory.classes
        if each.predicted_bytes or each.measured_bytes
    ]
    head = ("arm", "workload", "class", "predicted", "measured", "at most")
    note = "Measured when all requests had ended and caches were empty again; what these held at most stands beside."
    return Table("Memory by class", head, tuple(rows), note)


def formats_table(measurements: Sequence[Measurement]) -> Table:
    """Who was measured: "4-bit" alone says nothing."""
    rows = {}
    for one in measurements:
        arm = one.arm
        engine = f"{arm.engine} {arm.engine_version}".strip()
        engine += f", draft {arm.draft}" if arm.draft else ""
        engine += f", adapter {arm.adapter}" if arm.adapter else ""
        engine += f", {arm.sequences} requests at once" if arm.sequences > 1 else ""
        engine += f", prefixes up to {show_bytes(arm.prefix_bytes)}" if arm.prefix_bytes else ""
        kept = f"window {arm.window}, {arm.sinks} sinks" if arm.window else f"{arm.context:,} tokens"
        rows[arm.name] = (
            arm.name,
            engine,
            arm.model,
            arm.formats.linears,
            arm.formats.embedding,
            arm.formats.head,
            f"{arm.formats.bits_per_weight:g}",
            show_bytes(arm.formats.file_bytes),
            f"{kept}, {arm.kv_bits} bit" if arm.kv_bits else kept,
            str(arm.threads),
            {True: "yes", False: "no", None: "not compared"}[arm.formats.same_integers],
        )
    return Table(
        "Arms",
        ("arm", "engine", "model", "linears", "embedding", "head", "bits a weight", "files", "cache",
         "threads", "same integers"),
        tuple(rows.values()),
    )  # fmt: skip


def quality_table(evaluations: Sequence[Evaluation]) -> Table:
    rows = []
    for one in evaluations:
        found = one.divergence
        if found is None:
            continue
        rows.append(
            (
                f"{one.target} {one.backend} {one.recipe}",
                f"{found.kl_mean:.3g} ± {found.kl_error:.1g}",
                f"{found.kl_median:.3g}",
                f"{found.kl_p999:.3g}",
                f"{found.kl_max:.3g}",
                f"{found.same_top:.2%} ± {found.same_top_error:.2%}",
                f"{found.perplexity:.4g}",
                f"{found.reference_perplexity:.4g}",
                f"{found.log_ratio:+.4f} ± {found.log_ratio_error:.4f}",
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


def points_table(report: Report) -> Table:
    rows = [
        (
            point.name,
            f"{point.decode_tokens_per_s:.4g}" if point.decode_tokens_per_s is not None else "disturbed",
            f"{point.kl:.3g}" if point.kl is not None else "",
            f"{point.same_top:.2%}" if point.same_top is not None else "",
            _size(point.memory_bytes),
            show_bytes(point.file_bytes),
            f"dominated by {point.dominated_by}" if point.dominated_by else "worth having",
        )
        for point in report.points
    ]
    return Table(
        "Recipes",
        ("recipe", "decode tok/s", "KL", "same top token", "peak memory", "files", ""),
        tuple(rows),
        "Dominated: another recipe is no slower, no further from the float model and no larger in memory, and better in"
        " one of these.",
    )


def conditions_table(measurements: Sequence[Measurement]) -> Table:
    rows: dict[tuple[str, ...], None] = {}
    for one in measurements:
        now = one.conditions
        figures = (
            ("machine", f"{now.machine}, {now.cores} cores, {_size(now.ram_bytes)}"),
            ("system", now.os),
            ("load average", f"{now.load_average:g}" if now.load_average is not None else ""),
            ("power", now.power_source or ""),
            ("temperature", f"{now.temperature_c:g} °C" if now.temperature_c is not None else ""),
            ("core frequency", f"{now.frequency_mhz:g} MHz" if now.frequency_mhz is not None else ""),
            ("memory read before", f"{now.read_gb_s:g} GB/s" if now.read_gb_s else ""),
            ("memory read after", f"{now.read_gb_s_after:g} GB/s" if now.read_gb_s_after else ""),
            ("energy", one.energy_source or ""),
            ("versions", ", ".join(f"{name} {version}" for name, version in now.versions.items())),
        )
        for name, value in figures:
            rows[one.workload, now.measured_at, name, value or "not told by this machine"] = None
    return Table("Conditions", ("workload", "measured at", "what", ""), tuple(rows))


def notes_of(report: Report) -> tuple[str, ...]:
    """What a reader must know besides the tables."""
    found = list(report.notes)
    for one in report.measurements:
        if one.status != "valid":
            found.append(f"{one.arm.name}, {one.workload}: {one.status}: {one.why}")
        found += [f"{one.arm.name}: {note}" for note in one.notes]
    for each in report.evaluations:
        found += [f"{each.target} {each.recipe}: {note}" for note in each.notes]
    return tuple(dict.fromkeys(found))


def _size(count: int | None) -> str:
    return "" if count is None else show_bytes(count)


def differences_table(found: Comparison) -> Table:
    rows = [
        (
            f"{each.arm}, {each.workload}",
            each.case,
            each.metric,
            "" if each.before is None else f"{each.before:.4g}",
            "" if each.after is None else f"{each.after:.4g}",
            each.verdict,
            each.why,
        )
        for each in found.differences
    ]
    return Table("Before and after", ("arm", "case", "metric", "before", "after", "verdict", "why"), tuple(rows))
