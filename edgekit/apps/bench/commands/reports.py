"""Reports of measuring commands: shown on the terminal, and written as JSON, HTML and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from edgekit.commands import console as new_console, draw
from edgekit.common.base import Frozen
from edgekit.common.files import check_output, write_output
from edgekit.common.options import Option
from edgekit.errors import InvalidInput

if TYPE_CHECKING:
    from edgekit.apps.bench.report.results import Report
    from edgekit.apps.bench.report.tables import Table


class ReportFiles(Frozen):
    """The output files of a report, each in the form that its suffix names."""

    output: Annotated[tuple[Path, ...], Option(short="o", metavar="FILE")] = Field(
        default=(), description="Write the report there, in the form of the suffix: .json, .html or .md."
    )
    forms: ClassVar[tuple[str, ...]] = (".json", ".html", ".md")

    def check(self) -> None:
        """Check before the work that every file has a known form and can be written."""
        for path in self.output:
            if path.suffix not in self.forms:
                raise InvalidInput(f"--output {path}: the suffix says the form; give one of {', '.join(self.forms)}")
            check_output(path)

    def write(self, report: Report, **others: Callable[[], bytes]) -> None:
        """Write every file. `others` makes further forms, by suffix without the dot."""
        from edgekit.apps.bench.report.markdown import markdown
        from edgekit.apps.bench.report.page import page
        from edgekit.apps.bench.report.results import to_json

        texts = {".json": to_json, ".html": page, ".md": markdown}
        for path in self.output:
            text = texts.get(path.suffix)
            write_output(path, text(report).encode() if text else others[path.suffix.removeprefix(".")]())


def show_report(report: Report) -> None:
    """Print the headline, the tables and the notes; report files have memory by class and the conditions too."""
    from edgekit.apps.bench.report.headline import headline
    from edgekit.apps.bench.report.tables import notes_of, tables

    new_console().print(headline(report).sentence, markup=False)
    for table in tables(report, brief=True):
        show(table)
    show_notes(notes_of(report))


def show(table: Table) -> None:
    """Show a table; if it is wider than the terminal, as a block of lines per row."""
    draw(table.head, table.rows, title=table.title)
    if table.note:
        new_console().print(table.note, style="dim")


def show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        new_console().print(f"note: {note}")
