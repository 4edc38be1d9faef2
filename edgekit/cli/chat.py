"""`edgekit chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

import click

import edgekit
from edgekit.cli._answering import (
    answer_of,
    answering_options,
    interruptible,
    kept_prefixes,
    load_adapters,
    opening_of,
    show_notes,
    show_statistics,
    statistics,
    write,
)
from edgekit.errors import InvalidInput, Unsupported

_HELP = """/reset   forget the conversation
/stats   time, speed and memory of the last answer
/help    this
/exit    leave (ctrl-D too)
ctrl-C stops an answer; what was said so far stays in the conversation."""
_TOLD = "Type a message, /help for commands, ctrl-C to stop an answer."


@click.command(name="chat")
@click.argument("artifact")
@answering_options
@click.option("--stats", is_flag=True, help="Show time, speed and memory after each answer.")
def command(artifact: str, stats: bool, **options: Any) -> None:
    """Talk with ARTIFACT, a directory that `edgekit export` made. Messages come from the terminal or from a pipe."""
    wish = answer_of(options)
    began = perf_counter()
    with (
        edgekit.open(artifact, warm_template=True, **opening_of(options)) as runtime,
        kept_prefixes(runtime, options["prefixes"]),
    ):
        if not runtime.template.exists:
            raise Unsupported(f"{artifact}: the model has no chat template; use `edgekit run --raw`")
        show_notes(runtime)
        load_adapters(runtime, options["adapters"])
        conversation = Conversation(runtime, wish, options["system"], perf_counter() - began)
        if sys.stdin.isatty():
            _line_editing()
            click.echo(_TOLD, err=True)
        while (line := _read()) is not None:
            if conversation.obey(line):
                return
            if line.strip() and not line.strip().startswith("/"):
                conversation.say(line)
                if stats:
                    conversation.show_statistics()


class Conversation:
    """What was said so far, and the last answer's statistics."""

    def __init__(self, runtime: edgekit.Runtime, wish: dict[str, Any], system: str | None, opened_s: float) -> None:
        self._runtime, self._wish, self._opened_s = runtime, wish, opened_s
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._opening)
        self._last: dict[str, Any] | None = None

    def obey(self, line: str) -> bool:
        """Carry out a command, if it is one; whether to leave."""
        match line.strip():
            case "/exit":
                return True
            case "/reset":
                self._messages = list(self._opening)
                click.echo("The conversation is forgotten.", err=True)
            case "/stats":
                self.show_statistics()
            case "/help":
                click.echo(_HELP, err=True)
            case other if other.startswith("/"):
                click.echo(f"{other.split()[0]} is not a command; /help lists them.", err=True)
        return False

    def say(self, text: str) -> None:
        """Send a message and write the answer as it comes; a refused message is not remembered."""
        self._messages.append({"role": "user", "content": text})
        try:
            stream = self._runtime.stream(self._messages, **self._wish)
        except InvalidInput as error:
            self._messages.pop()
            click.echo(f"edgekit: {error} (/reset forgets the conversation)", err=True)
            return
        said = []
        with interruptible(stream):
            for piece in stream:
                said.append(piece.text)
                write(piece.text)
                if piece.timings is not None:
                    self._last = statistics(self._runtime, piece.timings, self._opened_s)
        click.echo()
        self._messages.append({"role": "assistant", "content": "".join(said)})

    def show_statistics(self) -> None:
        click.echo(show_statistics(self._last) if self._last else "Nothing was answered yet.", err=True)


def _read() -> str | None:
    """The next line; None at the end. ctrl-C at a prompt drops the line, not the program; a pipe has no prompt."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            click.echo("\n(ctrl-D or /exit leaves)", err=True)
        except UnicodeDecodeError:
            click.echo("edgekit: that line is not UTF-8", err=True)


def _line_editing() -> None:
    """Arrow keys and history, where Python was built with them; nothing is written to disk."""
    try:
        import readline
    except ImportError:
        return
    readline.set_auto_history(True)
