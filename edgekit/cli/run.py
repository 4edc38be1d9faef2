"""`edgekit run`: one answer, or the answers to a file of prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import click
from pydantic import Field

import edgekit
from edgekit.cli._answering import (
    Answering,
    generation_options,
    interruptible,
    kept_prefixes,
    load_adapters,
    show_metrics,
    show_notes,
    show_statistics,
    statistics,
    write,
)
from edgekit.cli._artifact_for import artifact_for
from edgekit.cli._batch import answer_all
from edgekit.cli._batch_on_ray import answer_on_ray, check_output_of_batch
from edgekit.cli._console import wrapped
from edgekit.cli._opening import Opening, Pressure, arguments_of
from edgekit.cli._options import SectionedCommand, options
from edgekit.cli._progress import progress_display
from edgekit.common.base import Frozen
from edgekit.common.options import Option
from edgekit.errors import InvalidInput
from edgekit.runtime.generation.sampling import Sampling
from edgekit.runtime.generation.stopping import Stopping

_MAX_STDIN_BYTES = 64 << 20


class RunOptions(Frozen):
    """The options of prompt, batch and output."""

    as_chat: Annotated[bool | None, Option(name="chat", negative="raw")] = Field(
        default=None, description="Apply the chat template (the default if there is one), or send PROMPT as it is."
    )
    batch: Path | None = Field(
        default=None, description="A jsonl file of prompts, answered together; PROMPT is then left out."
    )
    output: Annotated[Path | None, Option(short="o")] = Field(
        default=None, description="The file for the batch's answers; prompts that it answers already are skipped."
    )
    ray: Annotated[str | None, Option(metavar="ADDRESS")] = Field(
        default=None,
        description="Spread the batch over the Ray cluster at this HOST:PORT, `auto` or `local`; --memory applies to"
        " each worker.",
    )
    sequences: int | None = Field(
        default=None, description="Batch size: answers that are computed together; without it, as planned."
    )
    stats: bool = Field(default=False, description="Show time, speed and memory on stderr, predicted beside measured.")
    json_: Annotated[bool, Option(name="json")] = Field(
        default=False, description="Print one JSON object instead of streamed text."
    )


class RunArguments(Frozen):
    """The arguments of one run, without the prompt."""

    choice: RunOptions
    answering: Answering
    generation: dict[str, Any]
    opening: dict[str, Any]


_EXAMPLES = """\b
Examples:
  edgekit run demo "def add(a, b):"
  edgekit run ./SmolLM2-135M-Instruct "Name three rivers." --temperature 0.7
  edgekit run my-artifact --batch prompts.jsonl -o answers.jsonl --sequences 8
"""


@click.command(name="run", cls=SectionedCommand, epilog=_EXAMPLES)
@click.argument("model")
@click.argument("prompt", required=False)
@options(
    choice=RunOptions, opening=Opening, pressure=Pressure, answering=Answering, sampling=Sampling, stopping=Stopping
)
def command(
    model: str,
    prompt: str | None,
    choice: RunOptions,
    opening: Opening,
    pressure: Pressure,
    answering: Answering,
    sampling: Sampling,
    stopping: Stopping,
) -> int:
    """Answer PROMPT with MODEL: an artifact, a model's folder, a .gguf file, a hub id, or `demo`.

    A model that is not an artifact is planned and exported for this machine once, and cached. PROMPT - reads stdin.
    ctrl-C ends the answer with exit code 130. --batch answers every line of a file; started again with the same
    output, an interrupted batch continues.
    """
    given = RunArguments(
        choice=choice,
        answering=answering,
        generation=generation_options(answering, sampling, stopping),
        opening=arguments_of(opening, pressure),
    )
    if choice.batch is not None:
        return _batch(model, prompt, choice.batch, given)
    for name, value in (("--output", choice.output), ("--sequences", choice.sequences), ("--ray", choice.ray)):
        if value is not None:
            raise InvalidInput(f"{name}: belongs to --batch FILE")
    if prompt is None:
        raise InvalidInput("PROMPT is missing; give a text, - for standard input, or --batch FILE")
    return _answer(artifact_for(model, opening.context), _stdin() if prompt == "-" else prompt, given)


def _answer(artifact: Path, prompt: str, given: RunArguments) -> int:
    choice, system = given.choice, given.answering.system
    began = perf_counter()
    with (
        edgekit.open(artifact, warm_template=choice.as_chat is not False, **given.opening) as runtime,
        kept_prefixes(runtime, given.answering.prefixes),
    ):
        opened_s = perf_counter() - began
        show_notes(runtime)
        load_adapters(runtime, given.answering.adapters)
        chat = runtime.template.exists if choice.as_chat is None else choice.as_chat
        if system is not None and not chat:
            raise InvalidInput("--system: needs the chat template; leave out --raw, or put it into the prompt")
        messages = [{"role": "system", "content": system}] if system is not None else []
        stream = runtime.stream(
            [*messages, {"role": "user", "content": prompt}] if chat else prompt, **given.generation
        )
        with interruptible(stream) as caught:
            pieces = []
            for piece in stream:
                pieces.append(piece)
                if not choice.json_:
                    write(piece.text)
        answer = stream.join(pieces)
        figures = statistics(runtime, answer.timings, opened_s) if choice.stats or choice.json_ else {}
    if choice.json_:
        shown = {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "seed": answer.seed,
            "tokens": len(answer.tokens),
            "statistics": figures,
        }
        click.echo(json.dumps(shown, indent=1))
    else:
        click.echo()
    if choice.stats and not choice.json_:
        click.echo(wrapped(show_statistics(figures), 10), err=True)
    return 130 if caught else 0


def _batch(model: str, prompt: str | None, file: Path, given: RunArguments) -> int:
    choice, answering = given.choice, given.answering
    refused = (("PROMPT", prompt), ("--chat", choice.as_chat), ("--system", answering.system), ("--json", choice.json_))
    for name, value in refused:
        if value:
            raise InvalidInput(f"{name}: belongs to one answer; a batch has `prompt` or `messages` in each line")
    artifact = artifact_for(model, given.opening["context"])
    if choice.ray is not None:
        return _batch_on_ray(artifact, file, choice.ray, given)
    with (
        edgekit.open(artifact, sequences=choice.sequences, **given.opening) as runtime,
        kept_prefixes(runtime, answering.prefixes),
        progress_display() as progress,
    ):
        show_notes(runtime)
        load_adapters(runtime, answering.adapters)
        began = perf_counter()
        failed = answer_all(runtime, file, choice.output, given.generation, progress)
        if choice.stats:
            click.echo(show_metrics(runtime, perf_counter() - began), err=True)
    return _failures(failed)


def _batch_on_ray(artifact: Path, file: Path, address: str, given: RunArguments) -> int:
    choice, answering = given.choice, given.answering
    for name, value in (
        ("--adapter", answering.adapters),
        ("--prefixes", answering.prefixes),
        ("--stats", choice.stats),
    ):
        if value:
            raise InvalidInput(f"{name}: belongs to a batch in one process; leave out {name}, or --ray")
    output = check_output_of_batch(choice.output)
    opening = given.opening | {"sequences": choice.sequences}
    with progress_display() as progress:
        failed = answer_on_ray(address, artifact, file, output, opening, given.generation, progress)
    return _failures(failed)


def _failures(failed: int) -> int:
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
