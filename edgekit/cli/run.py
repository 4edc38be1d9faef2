"""`edgekit run`: one answer from an artifact."""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any

import click

import edgekit
from edgekit.cli._answering import (
    answer_of,
    answering_options,
    interruptible,
    opening_of,
    show_notes,
    show_statistics,
    statistics,
    write,
)
from edgekit.errors import InvalidInput
from edgekit.runtime.stream import joined

_MAX_STDIN_BYTES = 64 << 20


@click.command(name="run")
@click.argument("artifact")
@click.argument("prompt")
@click.option("--chat/--raw", "as_chat", default=None, help="Through the chat template (default, if any), or as it is.")
@answering_options
@click.option("--stats", is_flag=True, help="Show time, speed and memory, predicted beside measured, on stderr.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of streamed text.")
def command(artifact: str, prompt: str, as_chat: bool | None, stats: bool, as_json: bool, **options: Any) -> int:
    """Answer PROMPT with ARTIFACT, a directory that `edgekit export` made. PROMPT - reads standard input.

    ctrl-C ends the answer; the exit code is then 130.
    """
    text = _stdin() if prompt == "-" else prompt
    wish = answer_of(options)
    began = perf_counter()
    with edgekit.open(artifact, warm_template=as_chat is not False, **opening_of(options)) as runtime:
        opened_s = perf_counter() - began
        show_notes(runtime)
        chat = runtime.template.exists if as_chat is None else as_chat
        if options["system"] is not None and not chat:
            raise InvalidInput("--system: needs the chat template; leave out --raw, or put it into the prompt")
        messages = [{"role": "system", "content": options["system"]}] if options["system"] is not None else []
        stream = runtime.stream([*messages, {"role": "user", "content": text}] if chat else text, **wish)
        with interruptible(stream) as caught:
            pieces = []
            for piece in stream:
                pieces.append(piece)
                if not as_json:
                    write(piece.text)
        answer = joined(pieces, stream)
        found = statistics(runtime, answer.timings, opened_s)
    if as_json:
        shown = {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "seed": answer.seed,
            "tokens": len(answer.tokens),
            "statistics": found,
        }
        click.echo(json.dumps(shown, indent=1))
    else:
        click.echo()
    if stats and not as_json:
        click.echo(show_statistics(found), err=True)
    return 130 if caught else 0


def _stdin() -> str:
    data = sys.stdin.buffer.read(_MAX_STDIN_BYTES + 1)
    if len(data) > _MAX_STDIN_BYTES:
        raise InvalidInput(f"standard input: more than {_MAX_STDIN_BYTES:,} bytes; give less text")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput("standard input: is not text in UTF-8") from error
