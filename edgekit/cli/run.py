"""`edgekit run`: one answer, or the answers to a file of prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter

import click

from edgekit.cli._answers import (
    SAMPLING,
    STOPPING,
    Answering,
    Repetition,
    generation_options,
    interruptible,
    opened,
    show_statistics,
    statistics,
    why_cut,
    write,
)
from edgekit.cli._artifact_for import artifact_for
from edgekit.cli._batch import answer_batch
from edgekit.cli._console import wrapped
from edgekit.cli._native import answer_natively, refuse_what_native_lacks
from edgekit.cli._one_answer import RunArguments, RunOptions, RunResult, prompt_of
from edgekit.cli._options import OPENING, SectionedCommand, SomeFields, options
from edgekit.errors import InvalidInput
from edgekit.runtime.generation.sampling import Sampling
from edgekit.runtime.generation.stopping import Stopping
from edgekit.runtime.open_options import OpenOptions

_MAX_STDIN_BYTES = 64 << 20


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
    choice=RunOptions,
    opening=SomeFields(OpenOptions, ("target", *OPENING, "sequences")),
    answering=Answering,
    sampling=SAMPLING,
    stopping=STOPPING,
)
def command(
    model: str,
    prompt: str | None,
    choice: RunOptions,
    opening: OpenOptions,
    answering: Answering,
    sampling: Sampling,
    stopping: Stopping,
) -> int:
    """Answer PROMPT with MODEL: an artifact, a model's folder, a .gguf file, a hub id, or `demo`.

    A model that is not an artifact is planned and exported for this machine once, and cached. PROMPT - reads stdin.
    ctrl-C ends the answer with exit code 130. --batch answers every line of a file; started again with the same
    output, an interrupted batch continues.
    """
    if choice.native:
        refuse_what_native_lacks("choice", "opening", "answering", "sampling", "stopping")
    given = RunArguments(
        choice=choice,
        answering=answering,
        generation=generation_options(answering, sampling, stopping),
        opening=opening,
    )
    if choice.batch is not None:
        return _batch(model, prompt, choice.batch, given)
    for name, value in (("--output", choice.output), ("--sequences", opening.sequences)):
        if value is not None:
            raise InvalidInput(f"{name}: belongs to --batch FILE")
    if prompt is None:
        raise InvalidInput("PROMPT is missing; give a text, - for standard input, or --batch FILE")
    artifact, text = artifact_for(model, opening), _stdin() if prompt == "-" else prompt
    result = answer_natively(artifact, text, given) if choice.native else _answer(artifact, text, given)
    if choice.json_:
        click.echo(json.dumps(result.shown, indent=1))
    else:
        click.echo()
        if why := _ending(result, given.generation.get("max_tokens")):
            click.echo(f"edgekit: {why}", err=True)
    if choice.stats and not choice.json_:
        click.echo(wrapped(show_statistics(result.figures), 10), err=True)
    return 130 if result.is_interrupted else 0


def _answer(artifact: Path, prompt: str, given: RunArguments) -> RunResult:
    choice = given.choice
    opening = given.opening.model_copy(update={"warm_template": choice.as_chat is not False})
    began = perf_counter()
    with opened(artifact, opening, given.answering) as runtime:
        opened_s = perf_counter() - began
        stream = runtime.stream(prompt_of(prompt, given, runtime.template), **given.generation)
        with interruptible(stream) as caught:
            repetition = Repetition(stream) if given.generation.get("max_tokens") is None else None
            for piece in stream:
                if (repetition is None or repetition.adds(piece)) and not choice.json_:
                    write(piece.text)
        answer = stream.answer()
        figures = statistics(runtime, answer.timings, opened_s) if choice.stats or choice.json_ else {}
    return RunResult(answer.text, answer.finish_reason, answer.seed, len(answer.tokens), figures, bool(caught))


def _ending(result: RunResult, limit: int | None) -> str | None:
    """Return why an answer ends where it does, unless the model or the user ended it."""
    if result.finish_reason == "cancelled" and not result.is_interrupted:
        return "stopped: the answer repeated itself; --max-tokens, a temperature or another prompt helps"
    return why_cut(result.tokens, limit) if result.finish_reason == "length" else None


def _batch(model: str, prompt: str | None, file: Path, given: RunArguments) -> int:
    choice, answering = given.choice, given.answering
    refused = (("PROMPT", prompt), ("--chat", choice.as_chat), ("--system", answering.system), ("--json", choice.json_))
    for name, value in refused:
        if value:
            raise InvalidInput(f"{name}: belongs to one answer; a batch has `prompt` or `messages` in each line")
    return answer_batch(artifact_for(model, given.opening), file, given)


def _stdin() -> str:
    data = sys.stdin.buffer.read(_MAX_STDIN_BYTES + 1)
    if len(data) > _MAX_STDIN_BYTES:
        raise InvalidInput(f"standard input: more than {_MAX_STDIN_BYTES:,} bytes; give less text")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput("standard input: is not text in UTF-8") from error
