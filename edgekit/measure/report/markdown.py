"""A report as Markdown, for pull requests and pages. Whatever came from a measurement is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator

from edgekit.measure.report.tables import Table, notes_of, tables
from edgekit.measure.results import Report

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def markdown(report: Report, level: int = 1) -> str:
    """The whole report under a heading of that level."""
    return "\n".join(_lines(report, "#" * level)) + "\n"


def _lines(report: Report, heading: str) -> Iterator[str]:
    yield f"{heading} {escaped(report.title)}"
    for table in tables(report):
        yield ""
        yield f"{heading}# {escaped(table.title)}"
        yield ""
        yield from table_lines(table)
        if table.note:
            yield ""
            yield escaped(table.note)
    notes = notes_of(report)
    if notes:
        yield ""
        yield f"{heading}# Notes"
        yield ""
        yield from (f"- {escaped(note)}" for note in notes)


def table_lines(table: Table) -> Iterator[str]:
    yield "| " + " | ".join(escaped(cell) for cell in table.head) + " |"
    yield "|" + "---|" * len(table.head)
    for row in table.rows:
        yield "| " + " | ".join(escaped(cell) for cell in row) + " |"


def escaped(text: str) -> str:
    """Words that Markdown takes as they are, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
