"""What a run came to: for people as a page or Markdown, for CI as JUnit and an exit code. It measures nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple
from xml.etree import ElementTree

from edgekit.errors import InvalidInput, clip
from edgekit.lab.matrix import Cell, Lab
from edgekit.lab.store import RunInfo, Store
from edgekit.measure.compare import Difference, compare_runs
from edgekit.measure.measurement import Status
from edgekit.measure.results import Figures, Report
from edgekit.units import show_bytes

_MOST_SHOWN = 2000
_ARROWS = {"better": "▲", "worse": "▼", "no difference": "="}


class Row(NamedTuple):
    """One cell as it ended."""

    cell: Cell
    state: str
    why: str
    status: Status | None  # of its measurement, which the store keeps: a run may have more than memory holds
    speeds: tuple[float, ...]
    peak_bytes: int | None
    differences: tuple[Difference, ...]  # from the baseline's same cell
    regressions: tuple[Difference, ...]  # those that are past a threshold

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


def rows_of(store: Store, run: str, baseline: str | None = None) -> Iterator[Row]:
    """Every cell of a run, compared with the same device, artifact's name, workload and repeat of `baseline`."""
    lab = store.lab(run)
    why = {attempt.cell: attempt.why for attempt in store.attempts(run)}
    before = _Before(store, baseline) if baseline is not None else None
    for cell, state in store.cells(run):
        found = store.result(run, cell.id)
        other = before.cell(cell) if before is not None else None
        past = store.result(baseline, other) if baseline is not None and other is not None else None
        differences = compare_runs([past], [found]).differences if past is not None and found is not None else ()
        cases = found.cases if found else ()
        yield Row(
            cell,
            state,
            why.get(cell.id, ""),
            found.status if found else None,
            tuple(
                case.summary["decode_tokens_per_s"].median for case in cases if "decode_tokens_per_s" in case.summary
            ),
            found.memory.peak_bytes if found else None,
            differences,
            tuple(_regressions(lab, differences)),
        )


def exit_code(rows: list[Row]) -> int:
    """0: complete and no worse. 5: worse than the baseline. 4: something is missing, failed or was disturbed."""
    verdicts = {row.verdict for row in rows}
    if "worse" in verdicts:
        return 5
    return 0 if verdicts <= {"ok"} else 4


def report_of(store: Store, run: str, rows: list[Row], baseline: str | None) -> Report:
    """The run as a report like any other; devices' own words are only ever data in it."""
    info = store.info(run)
    measurements = [
        found.model_copy(update={"arm": found.arm.model_copy(update={"name": _arm(row.cell, found.arm.name)})})
        for row in rows[:_MOST_SHOWN]
        if row.status is not None and (found := store.result(run, row.cell.id)) is not None and found.cases
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
            rows=tuple(_cells(row) for row in rows[:_MOST_SHOWN] if row.cell.device == device.name),
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


def _arm(cell: Cell, name: str) -> str:
    """As tables of several devices and artifacts name it."""
    return f"{cell.device}, {_artifact(cell)}{f' #{cell.repeat}' if cell.repeat else ''}: {name}"


def junit(store: Store, run: str, rows: list[Row]) -> bytes:
    """JUnit XML: a case for each cell."""
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
        name = f"{row.cell.workload} #{row.cell.repeat} of {_artifact(row.cell)}"
        case = ElementTree.SubElement(suite, "testcase", classname=_printable(row.cell.device), name=_printable(name))
        if verdict in kinds:
            ElementTree.SubElement(case, kinds[verdict], message=_printable(_told(row)))
    text: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text


def baseline_of(lab: Lab, store: Store, run: str, asked: str | None = None) -> str | None:
    """The run that `run` is held against: as asked, as the lab's file says, or as `lab baseline set` said."""
    chosen = asked or lab.baseline or store.baseline(lab.name)
    if chosen is None or chosen == run:
        return None
    store.info(chosen)
    return chosen


class _Before:
    """The cells of a baseline. What was exported anew, by a plan that differs, is still the same question."""

    def __init__(self, store: Store, run: str) -> None:
        self._exact: dict[tuple[str, ...], str] = {}
        self._alike: dict[tuple[str, ...], list[str]] = {}
        for cell, _ in store.cells(run):
            self._exact[_question(cell, _artifact(cell))] = cell.id
            self._alike.setdefault(_question(cell, _without_plan(cell)), []).append(cell.id)

    def cell(self, cell: Cell) -> str | None:
        """The cell of the same device, artifact, workload and repeat; none where several could be meant."""
        alike = self._alike.get(_question(cell, _without_plan(cell)), [])
        return self._exact.get(_question(cell, _artifact(cell))) or (alike[0] if len(alike) == 1 else None)


def _question(cell: Cell, artifact: str) -> tuple[str, ...]:
    return cell.device, artifact, cell.workload_sha256, str(cell.repeat)


def _artifact(cell: Cell) -> str:
    return cell.artifact.rsplit("/", 1)[-1]


def _without_plan(cell: Cell) -> str:
    return re.sub(r"-[0-9a-f]{16}$", "", _artifact(cell))


def _regressions(lab: Lab, differences: tuple[Difference, ...]) -> Iterator[Difference]:
    allowed = {threshold.metric: threshold.worse_by for threshold in lab.thresholds}
    for one in differences:
        most = allowed.get(one.metric)  # type: ignore[call-overload]
        if one.verdict == "worse" and most is not None and one.change is not None and abs(one.change) > most:
            yield one


def _cells(row: Row) -> tuple[str, ...]:
    cell, peak = row.cell, row.peak_bytes
    return (
        cell.id,
        _artifact(cell),
        cell.workload,
        str(cell.repeat),
        row.state if row.status in (None, "valid") else str(row.status),
        " ".join(f"{speed:.1f}" for speed in row.speeds),
        f"{cell.predicted_decode_tokens_per_s:.1f}" if cell.predicted_decode_tokens_per_s else "",
        show_bytes(peak) if peak else "",
        show_bytes(cell.predicted_bytes) if cell.predicted_bytes else "",
        " ".join(_arrows(row)),
        clip(_told(row), 200).strip("'\"") if row.verdict != "ok" else "",
    )


def _arrows(row: Row) -> Iterator[str]:
    for one in row.differences:
        if one.metric == "decode_tokens_per_s" and one.verdict in _ARROWS and one.change is not None:
            yield f"{_ARROWS[one.verdict]}{one.change:+.1%}"


def _told(row: Row) -> str:
    worse = [f"{one.case}: {one.metric} {one.change:+.1%}" for one in row.regressions if one.change is not None]
    return "; ".join(worse) or row.why or row.state


def _trouble(store: Store, run: str) -> Iterator[Figures]:
    """Every attempt that gave no result, also where a later one did."""
    told = store.trouble(run, _MOST_SHOWN)
    if told:
        yield Figures(
            title="What happened on the way",
            head=("device", "cell", "attempt", "outcome", "why"),
            rows=tuple(
                (device, one.cell, str(one.number), one.outcome or "not ended", clip(one.why, 300).strip("'\""))
                for device, one in told
            ),
            source="edgekit lab run",
        )


def _notes(info: RunInfo, rows: list[Row], baseline: str | None) -> Iterator[str]:
    verdicts = [row.verdict for row in rows]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts))
    yield f"{len(rows):,} {'cell' if len(rows) == 1 else 'cells'}: {counts}."
    yield f"Compared with {baseline}." if baseline else "No baseline was set."
    if info.ended_at is None:
        yield "The run is not complete; `edgekit lab run --resume` goes on."
    if len(rows) > _MOST_SHOWN:
        yield f"Only the first {_MOST_SHOWN:,} cells are shown."


def _printable(text: str) -> str:
    """XML holds no control characters, however they are written."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)[:2000]


def same_lab(store: Store, runs: tuple[str, str]) -> None:
    """Two runs can be compared where they are of one lab."""
    one, other = (store.info(run).lab for run in runs)
    if one != other:
        raise InvalidInput(f"{runs[0]} is of lab {one} and {runs[1]} of lab {other}; compare runs of one lab")
