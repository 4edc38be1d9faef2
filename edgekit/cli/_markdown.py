"""Writes a streamed answer: unchanged into a pipe, as rendered Markdown on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from edgekit.cli._answers import write


@contextmanager
def answer_writer() -> Iterator[Callable[[str], None]]:
    """Yield a function that writes the pieces of one answer."""
    if not sys.stdout.isatty():
        yield write
        click.echo()
        return
    with _rendered() as take:
        yield take


@contextmanager
def _rendered() -> Iterator[Callable[[str], None]]:
    """Print finished Markdown blocks once; redraw the unfinished block with each piece."""
    from rich.console import Console
    from rich.live import Live
    from rich.markdown import Markdown

    console = Console()
    rest = ""
    with Live(console=console, transient=True, auto_refresh=False, vertical_overflow="crop") as live:

        def take(text: str) -> None:
            nonlocal rest
            finished, rest = split_blocks(rest + text)
            if finished.strip():
                console.print(Markdown(finished))
                console.print()
            live.update(Markdown(rest), refresh=True)

        try:
            yield take
        finally:
            live.update("", refresh=True)
            live.stop()
            console.print(Markdown(rest))


def split_blocks(text: str) -> tuple[str, str]:
    """Split `text` into complete paragraphs and code blocks, and the rest."""
    end, is_code, place = 0, False, 0
    for line in text.splitlines(keepends=True):
        place += len(line)
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not line.strip() and line.endswith("\n") and not is_code:
            end = place
    return text[:end], text[end:]
