"""Batches: answers the prompts of a jsonl file and skips those that the output file answers already."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.cli._lines import name_and_prompt, read_lines, submitted_ahead
from edgekit.common.progress import Progress
from edgekit.common.results_file import ResultsFile
from edgekit.errors import EdgekitError
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.stream import Stream

_KEYS = {"id", "prompt", "messages", "tools"}


class BatchLine(NamedTuple):
    """One line of the file: the prompt, its id, and its own generation options."""

    name: str | int
    prompt: Any
    tools: Any
    options: dict[str, Any]


def answer_all(runtime: Runtime, path: Path, output: Path | None, options: dict[str, Any], progress: Progress) -> int:
    """Answer every line of `path` in order. Returns the number of lines that failed."""
    total = sum(1 for _ in questions(path))  # every line is checked before the first is answered
    failed = 0
    with ResultsFile(output) as answers:
        lines = (one for one in questions(path) if one.name not in answers.names)
        progress(len(answers.names), total, "answers")
        submit = partial(submit_line, runtime, options)
        for question, stream in submitted_ahead(lines, submit, 4 * runtime.sequences):
            result = result_of(question, stream)
            failed += "error" in result
            answers.write(result)
            progress(len(answers.names), total, f"answers: {question.name}")
    return failed


def questions(path: Path) -> Iterator[BatchLine]:
    """Yield the lines of a file in order. Raises `InvalidInput` with the number of a faulty line."""
    return read_lines(path, _question)


def _question(line: dict[str, Any], where: str, number: int) -> BatchLine:
    name, prompt = name_and_prompt(line, where, number)
    options = {key: value for key, value in line.items() if key not in _KEYS}
    if "logit_bias" in options and isinstance(options["logit_bias"], dict):
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items() if token.isdecimal()}
    return BatchLine(name, prompt, line.get("tools"), options)


def submit_line(runtime: Runtime, options: dict[str, Any], question: BatchLine) -> Stream | EdgekitError:
    """Submit one line; an error is returned in place of the stream."""
    try:
        return runtime.submit(question.prompt, tools=question.tools, **{**options, **question.options})
    except EdgekitError as error:
        return error


def result_of(question: BatchLine, stream: Stream | EdgekitError) -> dict[str, Any]:
    """Wait for the answer and return its line of the output file."""
    try:
        if isinstance(stream, EdgekitError):
            raise stream
        answer = stream.answer()
    except EdgekitError as error:
        return {"id": question.name, "error": str(error)}
    result: dict[str, Any] = {
        "id": question.name,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.timings.prompt_tokens,
        "tokens": len(answer.tokens),
        "seed": answer.seed,
    }
    if answer.tool_calls:
        result["tool_calls"] = [call.model_dump() for call in answer.tool_calls]
    return result
