"""A report as versioned data, and the reader of report files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from edgekit.apps.bench.eval.evaluation import Evaluation
from edgekit.apps.bench.measurement import Measurement
from edgekit.apps.bench.tasks.results import TaskReport
from edgekit.common.base import Frozen
from edgekit.common.parsing import parse_json, read_bytes, validate
from edgekit.errors import InvalidInput, quote_short

MAX_REPORT_BYTES = 256 << 20


class Point(Frozen):
    """One recipe of a sweep, as a point in the charts."""

    name: str
    decode_tokens_per_s: float | None
    kl: float | None
    same_top: float | None
    memory_bytes: int | None
    file_bytes: int
    dominated_by: str | None = None
    is_disturbed: bool = False  # its speed is from trials disturbed by other programs or heat


class Figures(Frozen):
    """A table of figures from another program; `source` names the script or command."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    source: str

    @model_validator(mode="after")
    def _is_even(self) -> Figures:
        if any(len(row) != len(self.head) for row in self.rows):
            raise ValueError("every row needs as many cells as the head")
        return self


class Report(Frozen):
    """Measurements, evaluations and figures that belong together."""

    version: Literal[1] = 1
    kind: Literal["report"] = "report"
    title: str = Field(max_length=400)
    measurements: tuple[Measurement, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    tasks: TaskReport | None = None
    points: tuple[Point, ...] = ()
    tables: tuple[Figures, ...] = ()
    notes: tuple[str, ...] = ()


def read_report(path: Path) -> Report:
    """Read a report, or measurements as `bench --json` prints them, one a line."""
    data = read_bytes(path, MAX_REPORT_BYTES)
    lines = [line for line in data.splitlines() if line.strip()]
    if not lines:
        raise InvalidInput(f"{path}: is empty")
    # `--json` writes a measurement in one line, a report spans many.
    if lines[0].strip() != b"{":
        first = parse_json(lines[0], f"{path}:1")
        if first.get("kind") == "measurement":
            return Report(
                title=path.stem,
                measurements=tuple(validate(line, Measurement, f"{path}:{n}") for n, line in enumerate(lines, 1)),
            )
    whole = parse_json(data, str(path))
    if whole.get("kind") == "measurement":
        return Report(title=path.stem, measurements=(validate(data, Measurement, str(path)),))
    if whole.get("kind") != "report":
        raise InvalidInput(f"{path}: kind {quote_short(whole.get('kind'))}; expected a report of `edgekit bench -o`")
    return validate(data, Report, str(path))


def to_json(report: Report) -> str:
    return report.model_dump_json(indent=1) + "\n"


def pareto(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the points, each with the first other point that dominates it."""
    return tuple(
        point.model_copy(update={"dominated_by": next((o.name for o in points if _dominates(o, point)), None)})
        for point in points
    )


def _dominates(one: Point, other: Point) -> bool:
    """Return whether `one` is no worse in speed, distance from the float model and memory, and better in one."""
    figures = [
        (one.decode_tokens_per_s, other.decode_tokens_per_s, 1),
        (one.kl, other.kl, -1),
        (one.memory_bytes, other.memory_bytes, -1),
    ]
    if any((a is None) != (b is None) for a, b, _ in figures):
        return False
    known = [(a * sign, b * sign) for a, b, sign in figures if a is not None and b is not None]
    return bool(known) and all(a >= b for a, b in known) and any(a > b for a, b in known)
