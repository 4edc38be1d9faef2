"""`edgekit run`: one answer from an artifact."""

from __future__ import annotations

import json
import sys
from pathlib import Path
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
    show_metrics,
    show_notes,
    show_statistics,
    statistics,
    write,
)
from edgekit.cli._batch import answer_all
from edgekit.cli._progress import progress_display
from edgekit.errors import InvalidInput
from edgekit.runtime.stream import joined

_MAX_STDIN_BYTES = 64 << 20


@click.command(name="run")
@click.argument("artifact")
@click.argument("prompt", required=False)
@click.option("--chat/--raw", "as_chat", default=None, help="Through the chat template (default, if any), or as it is.")
@answering_options
@click.option(
    "--batch",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A jsonl file of prompts, answered together; PROMPT is then left out.",
)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Where the batch's answers go.")
@click.option("--sequences", type=int, help="Answers of a batch that advance together; without it, as planned.")
@click.option("--stats", is_flag=True, help="Show time, speed and memory, predicted beside measured, on stderr.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of streamed text.")
def command(
    artifact: str,
    prompt: str | None,
    as_chat: bool | None,
    batch: Path | None,
    output: Path | None,
    sequences: int | None,
    stats: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Answer PROMPT with ARTIFACT, a directory that `edgekit export` made. PROMPT - reads standard input.

    ctrl-C ends the answer; the exit code is then 130. With --batch every line of a file is answered; an interrupted
    batch goes on where it stood when it is started again with the same output.
    """
    if batch is not None:
        return _batch(artifact, prompt, as_chat, batch, output, sequences, stats, as_json, options)
    for name, value in (("--output", output), ("--sequences", sequences)):
        if value is not None:
            raise InvalidInput(f"{name}: belongs to --batch FILE")
    if prompt is None:
        raise InvalidInput("PROMPT is missing; give a text, - for standard input, or --batch FILE")
    text = _stdin() if prompt == "-" else prompt
    wish = answer_of(options)
    began = perf_counter()
    with (
        edgekit.open(artifact, warm_template=as_chat is not False, **opening_of(options)) as runtime,
        kept_prefixes(runtime, options["prefixes"]),
    ):
        opened_s = perf_counter() - began
        show_notes(runtime)
        load_adapters(runtime, options["adapters"])
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


def _batch(
    artifact: str,
    prompt: str | None,
    as_chat: bool | None,
    batch: Path,
    output: Path | None,
    sequences: int | None,
    stats: bool,
    as_json: bool,
    options: dict[str, Any],
) -> int:
    for name, value in (("PROMPT", prompt), ("--chat", as_chat), ("--system", options["system"]), ("--json", as_json)):
        if value:
            raise InvalidInput(f"{name}: belongs to one answer; a batch has `prompt` or `messages` in each line")
    wish = answer_of(options)
    with (
        edgekit.open(artifact, sequences=sequences, **opening_of(options)) as runtime,
        kept_prefixes(runtime, options["prefixes"]),
        progress_display() as progress,
    ):
        show_notes(runtime)
        load_adapters(runtime, options["adapters"])
        began = perf_counter()
        failed = answer_all(runtime, batch, output, wish, progress)
        if stats:
            click.echo(show_metrics(runtime, perf_counter() - began), err=True)
    if failed:
        click.echo(f"{failed} lines have an error in place of an answer", err=True)
    return 1 if failed else 0


def _stdin() -> str:
    data = sys.stdin.buffer.read(_MAX_STDIN_BYTES + 1)
    if len(data) > _MAX_STDIN_BYTES:
        raise InvalidInput(f"standard input: more than {_MAX_STDIN_BYTES:,} bytes; give less text")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput("standard input: is not text in UTF-8") from error
