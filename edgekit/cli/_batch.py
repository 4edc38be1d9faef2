"""The prompts of a batch, a jsonl file, and their answers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import click

from edgekit.cli._answers import opened, show_metrics
from edgekit.cli._lines import LineFile, LineWork, name_and_prompt, work_through
from edgekit.cli._one_answer import RunArguments
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.stream import Stream

_KEYS = {"id", "prompt", "messages", "tools"}


class BatchLine(NamedTuple):
    """One line of the file: the prompt, its id, and its own generation options."""

    name: str | int
    prompt: Any
    tools: Any
    options: dict[str, Any]


def answer_batch(artifact: Path, file: Path, given: RunArguments) -> int:
    """Answer every line of a file. Raises `InvalidInput` with the number of a faulty line before any answer."""
    lines = LineFile(file, _question)
    with opened(artifact, given.opening, given.answering) as runtime:
        began = perf_counter()
        work = LineWork(partial(_submit, given.generation), _answer, "answers")
        code = work_through(runtime, lines, given.choice.output, work)
        if given.choice.stats:
            click.echo(show_metrics(runtime, perf_counter() - began), err=True)
    return code


def _submit(options: dict[str, Any], runtime: Runtime, line: BatchLine) -> Stream:
    return runtime.submit(line.prompt, tools=line.tools, **{**options, **line.options})


def _question(line: dict[str, Any], where: str, number: int) -> BatchLine:
    name, prompt = name_and_prompt(line, where, number)
    options = {key: value for key, value in line.items() if key not in _KEYS}
    if "logit_bias" in options and isinstance(options["logit_bias"], dict):
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items() if token.isdecimal()}
    return BatchLine(name, prompt, line.get("tools"), options)


def _answer(line: BatchLine, stream: Stream) -> dict[str, Any]:
    answer = stream.answer()
    calls = {"tool_calls": [call.model_dump() for call in answer.tool_calls]} if answer.tool_calls else {}
    return {
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.timings.prompt_tokens,
        "tokens": len(answer.tokens),
        "seed": answer.seed,
        **calls,
    }
