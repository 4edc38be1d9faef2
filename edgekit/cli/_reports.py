"""How commands that measure show and write what they found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.cli._console import console as new_console
from edgekit.cli._console import draw
from edgekit.files import check_output, write_output

if TYPE_CHECKING:
    from edgekit.measure.measurement import Measurement
    from edgekit.measure.report.tables import Table
    from edgekit.measure.results import Report


def check_reports(output: Path | None, html: Path | None, markdown: Path | None, *, charts: bool = True) -> None:
    """Refuse, before the work, what could not be written after it."""
    from edgekit.measure.report.charts import check_charts

    for path in (output, html, markdown):
        check_output(path)
    if html is not None and charts:
        check_charts()


def write_reports(report: Report, output: Path | None, html: Path | None, markdown: Path | None) -> None:
    """The same report in every form that was asked for."""
    from edgekit.measure.report.markdown import markdown as as_markdown
    from edgekit.measure.report.page import page
    from edgekit.measure.results import to_json

    for path, make in ((output, to_json), (html, page), (markdown, as_markdown)):
        if path is not None:
            write_output(path, make(report).encode())


def show_measurements(found: Sequence[Measurement], *, stats: bool = False) -> None:
    """The tables of speed, memory and formats; with `stats` those of drafting and of memory by class."""
    from edgekit.measure.report.tables import (
        classes_table,
        formats_table,
        memory_table,
        notes_of,
        speculation_table,
        speed_table,
    )
    from edgekit.measure.results import Report

    for workload in dict.fromkeys(one.workload for one in found):
        show(speed_table([one for one in found if one.workload == workload], workload))
    if stats and any(one.speculation for one in found):
        show(speculation_table(found))
    show(memory_table(found))
    if stats:
        show(classes_table(found))
    show(formats_table(found))
    show_notes(notes_of(Report(title="", measurements=tuple(found))))


def show(table: Table) -> None:
    """One table on the terminal; where it is too wide, each row as a block of lines."""
    draw(table.head, table.rows, title=table.title)
    if table.note:
        new_console().print(table.note, style="dim")


def show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        new_console().print(f"note: {note}")
