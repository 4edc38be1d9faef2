"""Reports of measuring commands: shown on the terminal, and written as JSON, HTML and Markdown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from edgekit.commands import console as new_console
from edgekit.commands import draw
from edgekit.common.base import Frozen
from edgekit.common.files import check_output, write_output
from edgekit.common.options import Option

if TYPE_CHECKING:
    from edgekit.apps.bench.measurement import Measurement
    from edgekit.apps.bench.report.cells import Table
    from edgekit.apps.bench.report.results import Report


class ReportFiles(Frozen):
    """The output files of a report."""

    output: Annotated[Path | None, Option(short="o")] = Field(
        default=None, description="Write the whole report there as JSON."
    )
    html: Path | None = Field(default=None, description="Write the report there as one HTML page.")
    markdown: Path | None = Field(default=None, description="Write the report there as Markdown.")

    def check(self, *, charts: bool = True) -> None:
        """Check before the work that every file can be written."""
        for path in (self.output, self.html, self.markdown):
            check_output(path)
        if self.html is not None and charts:
            from edgekit.apps.bench.report.charts import check_charts

            check_charts()

    def write(self, report: Report) -> None:
        """Write every requested form; the HTML page links to the JSON file in its folder."""
        from edgekit.apps.bench.report.markdown import markdown
        from edgekit.apps.bench.report.page import page
        from edgekit.apps.bench.report.results import to_json

        data = None
        if self.output is not None and self.html is not None:
            data = os.path.relpath(self.output, self.html.parent)
        texts = ((self.output, to_json), (self.html, lambda shown: page(shown, data)), (self.markdown, markdown))
        for path, render in texts:
            if path is not None:
                write_output(path, render(report).encode())


def show_measurements(measurements: Sequence[Measurement], *, stats: bool = False) -> None:
    """Print the headline and tables of speed, memory and formats; with `stats`, also drafting and memory by class."""
    from edgekit.apps.bench.report.headline import headline
    from edgekit.apps.bench.report.results import Report
    from edgekit.apps.bench.report.tables import (
        classes_table,
        formats_table,
        memory_table,
        notes_of,
        speculation_table,
        speed_table,
    )

    report = Report(title="", measurements=tuple(measurements))
    new_console().print(headline(report).sentence, markup=False)
    for workload in dict.fromkeys(one.workload for one in measurements):
        show(speed_table([one for one in measurements if one.workload == workload], workload))
    if stats and any(one.speculation for one in measurements):
        show(speculation_table(measurements))
    show(memory_table(measurements))
    if stats:
        show(classes_table(measurements))
    show(formats_table(measurements))
    show_notes(notes_of(report))


def show(table: Table) -> None:
    """Show a table; if it is wider than the terminal, as a block of lines per row."""
    draw(table.head, table.rows, title=table.title)
    if table.note:
        new_console().print(table.note, style="dim")


def show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        new_console().print(f"note: {note}")
