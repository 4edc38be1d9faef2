"""A report as Markdown, for pull requests and pages. Text from measurements is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator

from edgekit.apps.bench.report.headline import Headline, headline
from edgekit.apps.bench.report.results import Report
from edgekit.apps.bench.report.tables import Table, notes_of, tables

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    head = headline(report)
    yield f"# {escaped(report.title or head.context)}"
    for line in (head.context if head.context != report.title else "", head.sentence, _figures(head)):
        if line:
            yield ""
            yield escaped(line)
    for table in tables(report):
        yield ""
        yield f"## {escaped(table.title)}"
        yield ""
        yield from table_lines(table)
        if table.note:
            yield ""
            yield escaped(table.note)
    notes = notes_of(report)
    if notes:
        yield ""
        yield "## Notes"
        yield ""
        yield from (f"- {escaped(note)}" for note in notes)


def _figures(head: Headline) -> str:
    return "; ".join(f"{figure.label}: {figure.value} ({figure.detail})" for figure in head.figures)


def table_lines(table: Table) -> Iterator[str]:
    yield "| " + " | ".join(escaped(cell) for cell in table.head) + " |"
    yield "|" + "---|" * len(table.head)
    for row in table.rows:
        yield "| " + " | ".join(escaped(cell) for cell in row) + " |"


def escaped(text: str) -> str:
    """Escape text for one line of Markdown; plain words between backticks stay code."""
    parts = re.split(r"(`[A-Za-z0-9 ./=_-]+`)", " ".join(text.split()))
    return "".join(part if index % 2 else _SPECIAL.sub(r"\\\1", part) for index, part in enumerate(parts))
