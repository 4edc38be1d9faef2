"""A conversation in the terminal: its messages, slash commands and generation options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import edgekit
from edgekit.cli._answers import Repetition, interruptible, show_statistics, statistics, why_cut
from edgekit.cli._console import wrapped
from edgekit.cli._markdown import answer_writer
from edgekit.common.files import write_output
from edgekit.common.parsing import read_json
from edgekit.errors import EdgekitError, InvalidInput, near_names
from edgekit.runtime.options import GenerationParams

HELP = '''/set NAME VALUE  change an option of answers, e.g. /set temperature 0; /set alone shows them
/system TEXT     the system message; without TEXT, none
/undo            forget the last question and its answer
/retry           answer the last question again
/save FILE       write the conversation as JSON
/load FILE       continue a saved conversation
/reset           forget the conversation
/stats           time, speed and memory of the last answer
/help            this list
/exit            leave (ctrl-D too)
"""              begins and ends a message of several lines; a \\ at the end of a line continues it
ctrl-C stops an answer; its text so far stays in the conversation.'''
# What other programs call these commands.
_ELSEWHERE = {"/clear": "/reset", "/new": "/reset", "/quit": "/exit", "/bye": "/exit", "/q": "/exit", "/?": "/help"}


class Conversation:
    """The messages so far, and the generation options of the next answer."""

    def __init__(self, runtime: edgekit.Runtime, options: dict[str, Any], system: str | None, opened_s: float) -> None:
        self.options = options
        self._runtime, self._opened_s = runtime, opened_s
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._last: dict[str, Any] | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": self._set,
            "/system": self._set_system,
            "/undo": self._undo,
            "/retry": self._retry,
            "/save": self._save,
            "/load": self._load,
            "/reset": self._reset,
            "/stats": lambda _: _tell(show_statistics(self._last) if self._last else "Nothing was answered yet.", 10),
            "/help": lambda _: _tell(HELP, HELP.index("change")),
        }

    def obey(self, command: str) -> bool:
        """Run a slash command; return True if the conversation ends."""
        typed, _, argument = command.strip().partition(" ")
        name = _ELSEWHERE.get(typed, typed)
        if name == "/exit":
            return True
        action = self._commands.get(name)
        if action is None:
            near = near_names(name, [*self._commands, "/exit"], most=1)
            _tell(f"{name} is not a command; {f'did you mean {near[0]}? ' if near else ''}/help lists them.")
            return False
        try:
            action(argument.strip())
        except EdgekitError as error:
            _tell(f"edgekit: {error}")
        return False

    def say(self, text: str) -> None:
        """Send a message and stream the answer; a refused message is dropped."""
        self._messages.append({"role": "user", "content": text})
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        try:
            stream = self._runtime.stream([*system, *self._messages], **self.options)
        except InvalidInput as error:
            self._messages.pop()
            _tell(f"edgekit: {error} (/reset forgets the conversation)")
            return
        repetition, cut = Repetition(stream), ""
        with interruptible(stream), answer_writer() as write:
            for piece in stream:
                if repetition.adds(piece):
                    write(piece.text)
                if piece.timings is not None:
                    self._last = statistics(self._runtime, piece.timings, self._opened_s)
                    if piece.finish_reason == "length":
                        cut = f"({why_cut(piece.timings.tokens, self.options.get('max_tokens'))})"
        if repetition.is_found:
            _tell("(stopped: the answer repeated itself; /set repetition_penalty 1.1 or a temperature helps)")
        elif cut:
            _tell(cut)
        self._messages.append({"role": "assistant", "content": repetition.text})

    def _set(self, argument: str) -> None:
        if not argument:
            _tell("  ".join(f"{name} {json.dumps(value)}" for name, value in self.options.items()) or "all defaults")
            return
        name, _, text = argument.partition(" ")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        changed = {**self.options, name: value}
        GenerationParams.parse(changed)
        self.options = changed

    def _set_system(self, text: str) -> None:
        self._system = text or None
        _tell("The system message is set." if text else "There is no system message now.")

    def _undo(self, _: str) -> None:
        question = self._forget_last()
        _tell("There is nothing to undo." if question is None else f"Forgotten: {question[:60]}")

    def _retry(self, _: str) -> None:
        question = self._forget_last()
        if question is None:
            _tell("There is no question to answer again.")
        else:
            self.say(question)

    def _forget_last(self) -> str | None:
        """Drop the last question and its answer; return the question, None if there is none."""
        if len(self._messages) < 2:
            return None
        self._messages.pop()
        return self._messages.pop()["content"]

    def _reset(self, _: str) -> None:
        self._messages.clear()
        _tell("The conversation is forgotten.")

    def _save(self, file: str) -> None:
        if not file:
            raise InvalidInput("/save needs the name of a file")
        saved = {"system": self._system, "options": self.options, "messages": self._messages}
        write_output(Path(file), json.dumps(saved, indent=1, ensure_ascii=False).encode())
        _tell(f"Saved to {file}.")

    def _load(self, file: str) -> None:
        if not file:
            raise InvalidInput("/load needs the name of a file")
        saved = read_json(Path(file))
        messages, system, options = saved.get("messages"), saved.get("system"), saved.get("options", {})
        is_fine = isinstance(messages, list) and isinstance(options, dict) and isinstance(system, str | None)
        if not is_fine or not all(map(_is_message, messages or ())):
            raise InvalidInput(f"{file}: holds no conversation; /save writes one")
        GenerationParams.parse(options)
        self._messages, self._system, self.options = list(messages or ()), system, options
        _tell(f"Loaded {len(self._messages)} messages.")


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and value["role"] in ("user", "assistant")
        and isinstance(value["content"], str)
    )


def _tell(text: str, indent: int = 0) -> None:
    click.echo(wrapped(text, indent), err=True)
