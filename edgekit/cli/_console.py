"""Tables on standard output: fitted to the terminal, never truncated in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, TextIO

from edgekit.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 160
WIDE_TABLE = 110  # characters of a terminal's width from which large tables have all their columns
_NARROWEST = 20  # characters of the column that wraps; with less room, rows become blocks of lines


def console(*, soft_wrap: bool = False, wide: int = _WIDE) -> Console:
    """Return a console for stdout without markup; in a pipe, lines may be `wide` characters long."""
    from rich.console import Console

    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if has_width else wide, highlight=False, markup=False, soft_wrap=soft_wrap)


def wrapped(text: str, indent: int = 0, *, out: TextIO | None = None) -> str:
    """Wrap text if `out` (default: stderr) is a terminal; continuation lines are indented."""
    if not (out or sys.stderr).isatty():
        return text
    columns = get_terminal_size().columns
    return "\n".join(
        line if len(line) <= columns else fill(line, columns, subsequent_indent=" " * indent)
        for line in text.splitlines()
    )


def print_below(text: str, indent: int = 4) -> None:
    """Print a line below a heading; on a terminal it is wrapped, and further lines are indented."""
    print(wrapped(f"  {text}", indent, out=sys.stdout))  # noqa: T201


def draw(head: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", wraps_at: str | None = None) -> None:
    """Print a table or, if it is too wide, a block of lines per row. `wraps_at` names the column that may wrap."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    screen = console()
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(head, *rows, strict=True)]
    needed = [min(width, _NARROWEST) if name == wraps_at else width for name, width in zip(head, widths, strict=True)]
    if sum(needed) + 2 * (len(needed) - 1) <= screen.width:
        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for name in head:
            table.add_column(name, no_wrap=name != wraps_at)
        for row in rows:
            table.add_row(*row)
        screen.print(table)
        return
    if title:
        screen.print(title, style="italic")
    for row in rows:
        screen.print(row[0], style="bold")
        lines = [f"  {name:<18}  {cell}" for name, cell in zip(head[1:], row[1:], strict=True) if cell]
        screen.print(Text("\n".join(lines)), soft_wrap=True)
