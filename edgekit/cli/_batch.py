"""Many prompts from a file, answered together; what stands in the answers' file already is not asked again."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from edgekit.errors import EdgekitError, InvalidInput, clip
from edgekit.interfaces import Progress
from edgekit.reading import parse_json
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.stream import Stream

_MAX_LINE_BYTES = 16 << 20
_KEYS = {"id", "prompt", "messages", "tools"}


class Question(NamedTuple):
    """One line: what is asked, under which name, with which options of its own."""

    name: str | int
    prompt: Any
    tools: Any
    options: dict[str, Any]


def answer_all(runtime: Runtime, path: Path, output: Path | None, wish: dict[str, Any], progress: Progress) -> int:
    """Answer every line of `path` in order; how many had no answer but an error."""
    total = sum(1 for _ in questions(path))  # every line is checked before the first is answered
    done, failed = 0, 0
    # Some more than run at once, so that a long answer does not leave the others' places empty.
    ahead = 4 * runtime.sequences
    with _Answers(output) as answers:
        waiting: deque[tuple[Question, Stream | EdgekitError]] = deque()
        lines = (one for one in questions(path) if one.name not in answers.names)
        progress(len(answers.names), total, "answers")
        while True:
            while len(waiting) < ahead and (question := next(lines, None)) is not None:
                waiting.append((question, _asked(runtime, question, wish)))
            if not waiting:
                return failed
            question, stream = waiting.popleft()
            found = _answered(question, stream)
            failed += "error" in found
            answers.write(found)
            done += 1
            progress(len(answers.names), total, f"answers: {question.name}")


def questions(path: Path) -> Iterator[Question]:
    """The lines of a file, one after another; whatever is wrong is said with the number of its line."""
    names: set[str | int] = set()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > _MAX_LINE_BYTES:
                    raise InvalidInput(f"{path}, line {number}: longer than {_MAX_LINE_BYTES >> 20} MiB")
                if not line.strip():
                    continue
                question = _question(parse_json(line, f"{path}, line {number}"), f"{path}, line {number}", number)
                if question.name in names:
                    raise InvalidInput(f"{path}, line {number}: the id {clip(question.name)} stands there twice")
                names.add(question.name)
                yield question
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}; check the path") from error


def _question(line: dict[str, Any], where: str, number: int) -> Question:
    name = line.get("id", number)
    if type(name) not in (str, int):
        raise InvalidInput(f"{where}: id must be a text or a whole number, found {clip(name)}")
    prompts = [line[key] for key in ("prompt", "messages") if key in line]
    if len(prompts) != 1 or not isinstance(prompts[0], str if "prompt" in line else list):
        raise InvalidInput(f"{where}: give `prompt`, a text, or `messages`, a list of messages")
    options = {key: value for key, value in line.items() if key not in _KEYS}
    if "logit_bias" in options and isinstance(options["logit_bias"], dict):
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items() if token.isdecimal()}
    return Question(name, prompts[0], line.get("tools"), options)


def _asked(runtime: Runtime, question: Question, wish: dict[str, Any]) -> Stream | EdgekitError:
    try:
        return runtime.submit(question.prompt, tools=question.tools, **{**wish, **question.options})
    except EdgekitError as error:
        return error


def _answered(question: Question, stream: Stream | EdgekitError) -> dict[str, Any]:
    try:
        if isinstance(stream, EdgekitError):
            raise stream
        answer = stream.answer()
    except EdgekitError as error:
        return {"id": question.name, "error": str(error)}
    found: dict[str, Any] = {
        "id": question.name,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.timings.prompt_tokens,
        "tokens": len(answer.tokens),
        "seed": answer.seed,
    }
    if answer.tool_calls:
        found["tool_calls"] = [call.model_dump() for call in answer.tool_calls]
    return found


class _Answers:
    """A file of answers, a line each. A last line that was cut off is taken away when it is opened again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.names: set[str | int] = set()
        self._file: BinaryIO = sys.stdout.buffer

    def __enter__(self) -> _Answers:
        if self._path is None:
            return self
        try:
            file = self._path.open("a+b")
        except OSError as error:
            raise InvalidInput(f"{self._path}: cannot be written: {error.strerror}; choose another path") from error
        try:
            self._mend(file)
        except BaseException:
            file.close()
            raise
        self._file = file
        return self

    def _mend(self, file: BinaryIO) -> None:
        file.seek(0)
        whole = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            name = parse_json(line, f"{self._path}, byte {whole}").get("id")
            if not isinstance(name, str | int):
                raise InvalidInput(f"{self._path}: holds a line that is no answer; choose another file")
            self.names.add(name)
        file.truncate(whole)
        file.seek(0, os.SEEK_END)

    def write(self, found: dict[str, Any]) -> None:
        self._file.write(json.dumps(found, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.names.add(found["id"])

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            os.fsync(self._file.fileno())
            self._file.close()
