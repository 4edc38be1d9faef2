"""Writes a streamed answer: unchanged into a pipe, as rendered Markdown on a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from edgekit.cli._answers import write

if TYPE_CHECKING:
    from rich.console import Console

_CODE = re.compile(r"^```(?P<language>[\w+#-]*)[^\n]*\n(?P<code>.*?)(?:^```[^\n]*\n?|\Z)", re.MULTILINE | re.DOTALL)


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
    with _silent_keys(), Live(console=console, transient=True, auto_refresh=False, vertical_overflow="crop") as live:

        def take(text: str) -> None:
            nonlocal rest
            finished, rest = split_blocks(rest + text)
            if finished.strip():
                _print(console, finished)
                console.print()
            live.update(Markdown(rest), refresh=True)

        try:
            yield take
        finally:
            live.update("", refresh=True)
            live.stop()
            _print(console, rest)


def _print(console: Console, text: str) -> None:
    """Print whole blocks. Code has no margin, and its lines are broken by the terminal alone: it can be copied."""
    from rich.markdown import Markdown
    from rich.syntax import Syntax

    end = 0
    for code in [*_CODE.finditer(text), None]:
        prose = text[end : code.start() if code else None]
        if prose.strip():
            console.print(Markdown(prose))
        if code:
            end = code.end()
            shown = Syntax("", code["language"] or "text", theme="ansi_dark").highlight(code["code"])
            shown.rstrip()
            console.print(shown, soft_wrap=True)


@contextmanager
def _silent_keys() -> Iterator[None]:
    """Keep the terminal from writing keys, as ^C for ctrl-C: a line that is redrawn fills its width already."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    changed = [*before]
    changed[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


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
