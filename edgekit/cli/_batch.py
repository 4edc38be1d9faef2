"""The prompts of a batch, a jsonl file, and their answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.cli._lines import LineFile, name_and_prompt, results_of
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.stream import Stream

_KEYS = {"id", "prompt", "messages", "tools"}


class BatchLine(NamedTuple):
    """One line of the file: the prompt, its id, and its own generation options."""

    name: str | int
    prompt: Any
    tools: Any
    options: dict[str, Any]


def questions(path: Path) -> LineFile[BatchLine]:
    """Return the lines of a file. Raises `InvalidInput` with the number of a faulty line."""
    return LineFile(path, _question)


def answers_to(runtime: Runtime, options: dict[str, Any], lines: Iterable[BatchLine]) -> Iterator[dict[str, Any]]:
    """Yield a line of the output file for each question, in order."""

    def submit(line: BatchLine) -> Stream:
        return runtime.submit(line.prompt, tools=line.tools, **{**options, **line.options})

    return results_of(runtime, lines, submit, _answer)


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
