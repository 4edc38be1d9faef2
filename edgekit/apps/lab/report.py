"""Reports of lab runs: an HTML page or Markdown for people, JUnit and an exit code for CI."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple
from xml.etree import ElementTree

from edgekit.apps.bench import Difference, Figures, Measurement, Report, TrialStatus, compare_runs
from edgekit.apps.lab.matrix import Lab, MatrixEntry
from edgekit.apps.lab.store import LabStore, RunInfo
from edgekit.common.units import show_bytes
from edgekit.errors import quote_short

_MOST_SHOWN = 2000
_ARROWS = {"better": "▲", "worse": "▼", "no difference": "="}


class ReportRow(NamedTuple):
    """The result of one entry."""

    entry: MatrixEntry
    state: str
    why: str
    status: TrialStatus | None  # of its measurement, which stays in the store: a run's measurements may exceed memory
    speeds: tuple[float, ...]
    peak_bytes: int | None
    differences: tuple[Difference, ...]  # from the baseline's same entry
    regressions: tuple[Difference, ...]  # changes that exceed a threshold

    @property
    def verdict(self) -> Literal["ok", "worse", "disturbed", "failed", "lost", "waiting"]:
        if self.regressions:
            return "worse"
        if self.state in ("lost", "quarantined"):
            return "lost"
        if self.state == "failed":
            return "failed"
        if self.status is None:
            return "waiting"
        return "ok" if self.status == "valid" else "disturbed"


def rows_of(store: LabStore, run: str, baseline: str | None = None) -> Iterator[ReportRow]:
    """Yield every entry of a run, compared with the baseline's of the same device, artifact, workload and repeat."""
    lab = store.lab(run)
    why = {attempt.entry: attempt.why for attempt in store.attempts(run)}
    earlier = _Baseline(store, baseline) if baseline is not None else None
    for entry, state in store.entries(run):
        measurement = store.result(run, entry.id)
        other = earlier.entry(entry) if earlier is not None else None
        earlier_measurement = store.result(baseline, other) if baseline is not None and other is not None else None
        differences = (
            compare_runs([earlier_measurement], [measurement]).differences
            if earlier_measurement is not None and measurement is not None
            else ()
        )
        cases = measurement.cases if measurement else ()
        yield ReportRow(
            entry,
            state,
            why.get(entry.id, ""),
            measurement.status if measurement else None,
            tuple(
                case.summary["decode_tokens_per_s"].median for case in cases if "decode_tokens_per_s" in case.summary
            ),
            measurement.memory.peak_bytes if measurement else None,
            differences,
            tuple(_regressions(lab, differences)),
        )


def exit_code(rows: list[ReportRow]) -> int:
    """Return 0 if complete and not worse, 5 if worse than the baseline, 4 if a result is missing or disturbed."""
    verdicts = {row.verdict for row in rows}
    if "worse" in verdicts:
        return 5
    return 0 if verdicts <= {"ok"} else 4


def report_of(store: LabStore, run: str, rows: list[ReportRow], baseline: str | None) -> Report:
    """Return the run as a report; text from devices is escaped when it is shown."""
    info = store.info(run)
    measurements = [
        _with_subject_name(measurement, row.entry)
        for row in rows[:_MOST_SHOWN]
        if row.status is not None and (measurement := store.result(run, row.entry.id)) is not None and measurement.cases
    ]
    head = (
        "cell",
        "artifact",
        "workload",
        "repeat",
        "state",
        "decode tok/s",
        "predicted",
        "peak memory",
        "predicted ",
        "baseline",
        "why",
    )
    tables = [
        Figures(
            title=f"Device {device.name} ({device.kind}, {device.profile})",
            head=head,
            rows=tuple(_cells(row) for row in rows[:_MOST_SHOWN] if row.entry.device == device.name),
            source="edgekit lab run",
        )
        for device in store.lab(run).devices
    ]
    tables += _trouble(store, run)
    return Report(
        title=f"Lab {info.lab}, {run}",
        measurements=tuple(measurements),
        tables=tuple(tables),
        notes=tuple(_notes(info, rows, baseline)),
    )


def _with_subject_name(measurement: Measurement, entry: MatrixEntry) -> Measurement:
    subject = measurement.subject
    named = subject.model_copy(update={"name": _subject_name(entry, subject.name)})
    return measurement.model_copy(update={"subject": named})


def _subject_name(entry: MatrixEntry, name: str) -> str:
    """Return a subject's name for tables with several devices and artifacts."""
    return f"{entry.device}, {_artifact(entry)}{f' #{entry.repeat}' if entry.repeat else ''}: {name}"


def junit(store: LabStore, run: str, rows: list[ReportRow]) -> bytes:
    """Return JUnit XML with one test case per entry."""
    verdicts = [row.verdict for row in rows]
    suite = ElementTree.Element(
        "testsuite",
        name=f"edgekit lab {store.info(run).lab}",
        tests=str(len(rows)),
        failures=str(verdicts.count("failed") + verdicts.count("worse")),
        errors=str(verdicts.count("lost") + verdicts.count("waiting")),
        skipped=str(verdicts.count("disturbed")),
    )
    kinds = {"failed": "failure", "worse": "failure", "lost": "error", "waiting": "error", "disturbed": "skipped"}
    for row, verdict in zip(rows, verdicts, strict=True):
        name = f"{row.entry.workload} #{row.entry.repeat} of {_artifact(row.entry)}"
        case = ElementTree.SubElement(suite, "testcase", classname=_printable(row.entry.device), name=_printable(name))
        if verdict in kinds:
            ElementTree.SubElement(case, kinds[verdict], message=_printable(_reason(row)))
    text: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text


class _Baseline:
    """The entries of a baseline. An artifact of a changed plan is matched by its name without the plan's hash."""

    def __init__(self, store: LabStore, run: str) -> None:
        self._exact: dict[tuple[str, ...], str] = {}
        self._alike: dict[tuple[str, ...], list[str]] = {}
        for entry, _ in store.entries(run):
            self._exact[_key(entry, _artifact(entry))] = entry.id
            self._alike.setdefault(_key(entry, _name_without_plan(entry)), []).append(entry.id)

    def entry(self, entry: MatrixEntry) -> str | None:
        """Return the id of the entry with the same device, artifact, workload and repeat; None if several match."""
        alike = self._alike.get(_key(entry, _name_without_plan(entry)), [])
        return self._exact.get(_key(entry, _artifact(entry))) or (alike[0] if len(alike) == 1 else None)


def _key(entry: MatrixEntry, artifact: str) -> tuple[str, ...]:
    return entry.device, artifact, entry.workload_sha256, str(entry.repeat)


def _artifact(entry: MatrixEntry) -> str:
    return entry.artifact.rsplit("/", 1)[-1]


def _name_without_plan(entry: MatrixEntry) -> str:
    return re.sub(r"-[0-9a-f]{16}$", "", _artifact(entry))


def _regressions(lab: Lab, differences: tuple[Difference, ...]) -> Iterator[Difference]:
    allowed = {threshold.metric: threshold.worse_by for threshold in lab.thresholds}
    for one in differences:
        most = allowed.get(one.metric)  # type: ignore[call-overload]
        if one.verdict == "worse" and most is not None and one.change is not None and abs(one.change) > most:
            yield one


def _cells(row: ReportRow) -> tuple[str, ...]:
    entry, peak = row.entry, row.peak_bytes
    return (
        entry.id,
        _artifact(entry),
        entry.workload,
        str(entry.repeat),
        row.state if row.status in (None, "valid") else str(row.status),
        " ".join(f"{speed:.1f}" for speed in row.speeds),
        f"{entry.predicted_decode_tokens_per_s:.1f}" if entry.predicted_decode_tokens_per_s else "",
        show_bytes(peak) if peak else "",
        show_bytes(entry.predicted_bytes) if entry.predicted_bytes else "",
        " ".join(_arrows(row)),
        quote_short(_reason(row), 200).strip("'\"") if row.verdict != "ok" else "",
    )


def _arrows(row: ReportRow) -> Iterator[str]:
    for one in row.differences:
        if one.metric == "decode_tokens_per_s" and one.verdict in _ARROWS and one.change is not None:
            yield f"{_ARROWS[one.verdict]}{one.change:+.1%}"


def _reason(row: ReportRow) -> str:
    worse = [f"{one.case}: {one.metric} {one.change:+.1%}" for one in row.regressions if one.change is not None]
    return "; ".join(worse) or row.why or row.state


def _trouble(store: LabStore, run: str) -> Iterator[Figures]:
    """Yield a table of all attempts without a result, even if a later attempt succeeded."""
    attempts = store.trouble(run, _MOST_SHOWN)
    if attempts:
        yield Figures(
            title="What happened on the way",
            head=("device", "cell", "attempt", "outcome", "why"),
            rows=tuple(
                (device, one.entry, str(one.number), one.outcome or "not ended", quote_short(one.why, 300).strip("'\""))
                for device, one in attempts
            ),
            source="edgekit lab run",
        )


def _notes(info: RunInfo, rows: list[ReportRow], baseline: str | None) -> Iterator[str]:
    verdicts = [row.verdict for row in rows]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts))
    yield f"{len(rows):,} {'cell' if len(rows) == 1 else 'cells'}: {counts}."
    yield f"Compared with {baseline}." if baseline else "The lab's file names no baseline."
    if info.ended_at is None:
        yield "The run is not complete; `edgekit lab run --resume` continues it."
    if len(rows) > _MOST_SHOWN:
        yield f"Only the first {_MOST_SHOWN:,} cells are shown."


def _printable(text: str) -> str:
    """Replace characters that XML cannot hold."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)[:2000]
