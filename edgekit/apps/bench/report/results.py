"""A report as versioned data, and the reader of report files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from edgekit.apps.bench.eval.evaluation import Evaluation
from edgekit.apps.bench.measurement import Measurement
from edgekit.common.base import Frozen
from edgekit.common.parsing import parse_json, read_bytes, validate
from edgekit.errors import InvalidInput, quote_short

MAX_REPORT_BYTES = 256 << 20


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
