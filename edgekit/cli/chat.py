"""`edgekit chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import click

import edgekit
from edgekit.cli._answers import (
    SAMPLING,
    STOPPING,
    Answering,
    generation_options,
    opened,
)
from edgekit.cli._artifact_for import artifact_for
from edgekit.cli._console import wrapped
from edgekit.cli._conversation import Conversation
from edgekit.cli._options import OPENING, SectionedCommand, SomeFields, options
from edgekit.common.units import show_bytes
from edgekit.errors import Unsupported
from edgekit.runtime.generation.sampling import Sampling
from edgekit.runtime.generation.stopping import Stopping
from edgekit.runtime.open_options import OpenOptions
from edgekit.runtime.recommended import ChatSampling, chat_sampling

_QUOTES = '"""'


_EXAMPLES = """\b
Examples:
  edgekit chat demo
  edgekit chat my-artifact --system "Answer in one sentence." --temperature 0.5
"""


@click.command(name="chat", cls=SectionedCommand, epilog=_EXAMPLES)
@click.argument("model")
@options(
    opening=SomeFields(OpenOptions, ("target", *(name for name in OPENING if name != "exact"))),
    answering=SomeFields(Answering, ("system", "prefixes", "adapters")),
    sampling=SAMPLING,
    stopping=STOPPING,
)
def command(
    model: str,
    opening: OpenOptions,
    answering: Answering,
    sampling: Sampling,
    stopping: Stopping,
) -> None:
    """Talk with MODEL: an artifact, a model's folder, a .gguf file, a hub id, or `demo`.

    A model that is not an artifact is planned and exported for this machine once, and cached. Messages come from the
    terminal or a pipe. The default of --temperature is in the model's generation_config.json, or 0.7.
    """
    given = generation_options(answering, sampling, stopping)
    artifact = artifact_for(model, opening)
    began = perf_counter()
    with opened(artifact, opening.model_copy(update={"warm_template": True}), answering) as runtime:
        if not runtime.engine.capabilities.generates:
            use = "rerank" if runtime.engine.capabilities.classifies else "embed"
            raise Unsupported(f"{model}: an encoder writes no text; use `edgekit {use} {model} FILE`")
        if not runtime.template.exists:
            raise Unsupported(f"{model}: the model has no chat template; use `edgekit run --raw`")
        sampled = chat_sampling(artifact, given)
        conversation = Conversation(runtime, {**sampled.options, **given}, answering.system, perf_counter() - began)
        if sys.stdin.isatty():
            _prepare_line_editing()
            click.echo(wrapped(_header(runtime, artifact, conversation, sampled)), err=True)
        while (text := read_message()) is not None:
            if text.lstrip().startswith("/"):
                if conversation.obey(text):
                    return
            elif text.strip():
                conversation.say(text)


def _header(runtime: edgekit.Runtime, artifact: Path, conversation: Conversation, sampled: ChatSampling) -> str:
    assert runtime.artifact is not None
    plan = runtime.artifact.plan
    options = {name: f"{name} {value}" for name, value in conversation.options.items()}
    first = [text for name, text in options.items() if name in sampled.options or not sampled.options]
    chosen = [f"{', '.join(first)} ({sampled.source})", *(text for text in options.values() if text not in first)]
    return (
        f"{plan.model.name} as {plan.built_as}, "
        f"context {runtime.kv_config.capacity_tokens:,}, "
        f"{show_bytes(plan.estimate.private_bytes)} of private memory predicted\n"
        f"{', '.join(chosen)}\n"
        f"/help lists commands; {_QUOTES} begins a text of several lines; ctrl-C stops"
    )


def read_message() -> str | None:
    """Read the next message or command; None at the end of input.

    A message is one line, several lines joined by a backslash at the end, or the text between two triple quotes.
    """
    line = _read("> ")
    if line is None:
        return None
    if line.lstrip().startswith(_QUOTES):
        text = line.lstrip().removeprefix(_QUOTES)
        while not text.rstrip().endswith(_QUOTES):
            more = _read("… ")
            if more is None:
                return text.strip("\n")
            text += f"\n{more}"
        return text.rstrip().removesuffix(_QUOTES).strip("\n")
    while line.endswith("\\"):
        more = _read("… ")
        line = line.removesuffix("\\") + ("" if more is None else f"\n{more}")
        if more is None:
            break
    return line


def _read(prompt: str) -> str | None:
    """Read a line; None at the end. ctrl-C at a prompt drops the line; without a terminal there is no prompt."""
    while True:
        try:
            return input(prompt if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            click.echo("\n(ctrl-D or /exit leaves)", err=True)
        except UnicodeDecodeError:
            click.echo("edgekit: that line is not UTF-8", err=True)


def _prepare_line_editing() -> None:
    """Enable arrow keys, history, and pasting several lines as one message. Nothing is written to disk."""
    with suppress(ImportError):
        readline: Any = import_module("readline")
        readline.set_auto_history(True)
        readline.parse_and_bind("set enable-bracketed-paste on")
