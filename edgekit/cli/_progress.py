"""Progress of long work: a bar on a terminal, plain lines elsewhere, JSON lines for scripts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from edgekit.cli._console import wrapped
from edgekit.common.progress import Progress, Reporter
from edgekit.errors import printable

_LINE_EVERY_S = 2.0


@contextmanager
def progress_display(as_json: bool = False) -> Iterator[Progress]:
    """Show progress during the block: as text on stderr, or as JSON events on stdout."""
    if as_json:
        yield _events()
    elif sys.stderr.isatty():
        with _bar() as tell:
            yield tell
    else:
        yield _lines()


def _events() -> Progress:
    def tell(done: float, total: float, what: str) -> None:
        click.echo(json.dumps({"event": "progress", "done": done, "total": total, "what": what}))

    return tell


def _lines() -> Progress:
    """Print a line with the remaining time when a task starts and ends, and every two seconds."""
    last_task, last_at, began_at = "", 0.0, 0.0

    def tell(done: float, total: float, what: str) -> None:
        nonlocal last_task, last_at, began_at
        task, now = what.partition(":")[0], time.monotonic()
        if task == last_task and done < total and now - last_at < _LINE_EVERY_S:
            return
        if task != last_task:
            began_at = now
        last_task, last_at = task, now
        left = time_left(done, total, now - began_at)
        click.echo(f"{_percent(done, total):3.0f} %  {printable(what)}{left}", err=True)

    return tell


def time_left(done: float, total: float, elapsed_s: float) -> str:
    """Format the remaining time at the speed so far; empty for the first two seconds."""
    if not 0 < done < total or elapsed_s < _LINE_EVERY_S:
        return ""
    left_s = elapsed_s * (total - done) / done
    return f", about {left_s:.0f} s left" if left_s < 120 else f", about {left_s / 60:.0f} min left"


@contextmanager
def _bar() -> Iterator[Progress]:
    """Draw one bar per task with its step and the remaining time; a long step is cut to the terminal's width."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress as Bars, TaskID, TextColumn, TimeRemainingColumn
    from rich.table import Column

    columns = (
        TextColumn("{task.fields[task]}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:3.0f} %", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[at]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    with Bars(*columns, console=Console(stderr=True), expand=True) as bars:
        known: dict[str, TaskID] = {}

        def tell(done: float, total: float, what: str) -> None:
            task, _, at = printable(what).partition(": ")
            if task not in known:
                known[task] = bars.add_task("", total=100, task=task, at=at)
            bars.update(known[task], completed=_percent(done, total), at=at)

        yield tell


def _percent(done: float, total: float) -> float:
    return 100 * min(1.0, done / total) if total > 0 else 100.0


def announce(text: str) -> None:
    """Print a note to stderr, wrapped on a terminal; stdout stays clean for scripts."""
    click.echo(wrapped(f"edgekit: {text}"), err=True)


def reporter(progress: Progress) -> Reporter:
    """Return the reporter of a command: notes and warnings go to stderr."""
    return Reporter(progress, announce, announce)
