"""How long work is shown: a bar on a terminal, plain lines elsewhere, JSON lines where a script reads."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from edgekit.interfaces import Progress

_LINE_EVERY_S = 2.0


@contextmanager
def progress_display(as_json: bool = False) -> Iterator[Progress]:
    """A `Progress` for the length of the block: on stderr, so that results stand alone; JSON events go to stdout."""
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
    """A line when the task changes, when it is done, and every two seconds between."""
    last_task, last_at = "", 0.0

    def tell(done: float, total: float, what: str) -> None:
        nonlocal last_task, last_at
        task, now = what.partition(":")[0], time.monotonic()
        if task == last_task and done < total and now - last_at < _LINE_EVERY_S:
            return
        last_task, last_at = task, now
        click.echo(f"{_percent(done, total):3.0f} %  {what}", err=True)

    return tell


@contextmanager
def _bar() -> Iterator[Progress]:
    """One bar a task, with what it is at and the time that is left."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    task, at = (TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("task", "at"))
    columns = (task, BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeRemainingColumn(), at)
    with Bars(*columns, console=Console(stderr=True)) as bars:
        known: dict[str, TaskID] = {}

        def tell(done: float, total: float, what: str) -> None:
            task, _, at = what.partition(": ")
            if task not in known:
                known[task] = bars.add_task("", total=100, task=task, at=at)
            bars.update(known[task], completed=_percent(done, total), at=at)

        yield tell


def _percent(done: float, total: float) -> float:
    return 100 * min(1.0, done / total) if total > 0 else 100.0
