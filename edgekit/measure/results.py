"""A report as data: everything that one run found, versioned; and how such files are read again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from edgekit.errors import InvalidInput, clip
from edgekit.frozen import Frozen
from edgekit.measure.evaluation import Evaluation
from edgekit.measure.measurement import Measurement
from edgekit.reading import parse_json, read_bytes, validate

MAX_REPORT_BYTES = 256 << 20


class Point(Frozen):
    """One recipe of a sweep, as the charts place it."""

    name: str
    decode_tokens_per_s: float | None
    kl: float | None
    same_top: float | None
    memory_bytes: int | None
    file_bytes: int
    dominated_by: str | None = None


class Figures(Frozen):
    """A table of figures that no measurement or evaluation holds; `source` says what produced them."""

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
    points: tuple[Point, ...] = ()
    tables: tuple[Figures, ...] = ()
    notes: tuple[str, ...] = ()


def read_report(path: Path) -> Report:
    """A report, or measurements as `--json` prints them, one a line."""
    data = read_bytes(path, MAX_REPORT_BYTES)
    lines = [line for line in data.splitlines() if line.strip()]
    if not lines:
        raise InvalidInput(f"{path}: is empty")
    # Measurements stand one on a line; a report is written over many.
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
        raise InvalidInput(f"{path}: kind {clip(whole.get('kind'))}; expected a report of `edgekit bench -o`")
    return validate(data, Report, str(path))


def to_json(report: Report) -> str:
    return report.model_dump_json(indent=1) + "\n"


def pareto(points: Sequence[Point]) -> tuple[Point, ...]:
    """The same points, each with the first one that is no worse in anything and better in something."""
    return tuple(
        point.model_copy(update={"dominated_by": next((o.name for o in points if _dominates(o, point)), None)})
        for point in points
    )


def _dominates(one: Point, other: Point) -> bool:
    """Faster, closer to the float model and smaller; where a figure is missing, nobody dominates by it."""
    figures = [
        (one.decode_tokens_per_s, other.decode_tokens_per_s, 1),
        (one.kl, other.kl, -1),
        (one.memory_bytes, other.memory_bytes, -1),
    ]
    if any((a is None) != (b is None) for a, b, _ in figures):
        return False
    known = [(a * sign, b * sign) for a, b, sign in figures if a is not None and b is not None]
    return bool(known) and all(a >= b for a, b in known) and any(a > b for a, b in known)
