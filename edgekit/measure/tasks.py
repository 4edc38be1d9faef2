"""Tasks from a local jsonl: choices by likelihood, exact answers, and tool calls that must follow their schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from edgekit.errors import InvalidInput, clip
from edgekit.frozen import Frozen
from edgekit.interfaces import Chunk
from edgekit.measure.divergence import log_softmax
from edgekit.measure.evaluation import TaskScore
from edgekit.measure.schemas_of_tools import violation
from edgekit.reading import read_bytes, sentence_of
from edgekit.runtime.runtime import Runtime

_MAX_TASKS_BYTES = 64 << 20
_MAX_TASKS = 100_000
_KEPT_FAILURES = 20

_Prompt = Annotated[str, Field(min_length=1, max_length=1 << 20)]
_Messages = Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=256)]


class Choice(Frozen):
    """Which continuation is the likeliest, by the mean likelihood of its tokens."""

    kind: Literal["choice"]
    prompt: _Prompt
    choices: Annotated[tuple[str, ...], Field(min_length=2, max_length=64)]
    answer: Annotated[int, Field(ge=0)]


class Exact(Frozen):
    """The greedy answer begins with the expected one; white space around both does not count."""

    kind: Literal["exact"]
    prompt: _Prompt | None = None
    messages: _Messages | None = None
    answer: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 64


class Tool(Frozen):
    """The greedy answer calls a tool, and its arguments follow that tool's schema."""

    kind: Literal["tool"]
    messages: _Messages
    tools: Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=64)]
    expected: str | None = None  # the tool's name, where only one is right
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 256


Task = Choice | Exact | Tool
_TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])


def read_tasks(path: Path) -> list[Task]:
    """One task a line; an error names the line."""
    found: list[Task] = []
    for number, line in enumerate(read_bytes(path, _MAX_TASKS_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = _TASK.validate_json(line)
        except ValidationError as error:
            raise InvalidInput(f"{path}:{number}: {sentence_of(error)}") from error
        if isinstance(task, Choice) and task.answer >= len(task.choices):
            raise InvalidInput(f"{path}:{number}: answer {task.answer} is none of {len(task.choices)} choices")
        if isinstance(task, Exact) and (task.prompt is None) == (task.messages is None):
            raise InvalidInput(f"{path}:{number}: give either prompt or messages")
        found.append(task)
        if len(found) > _MAX_TASKS:
            raise InvalidInput(f"{path}: more than {_MAX_TASKS:,} tasks; split the file")
    if not found:
        raise InvalidInput(f"{path}: holds no task; write one JSON object a line")
    return found


def score(runtime: Runtime, tasks: Sequence[Task]) -> tuple[TaskScore, ...]:
    """Every kind of task that is there."""
    failures: dict[str, list[str | None]] = {}
    for task in tasks:
        failures.setdefault(task.kind, []).append(_failure(runtime, task))
    return tuple(_scored(kind, found) for kind, found in failures.items())


def _scored(kind: Any, failures: Sequence[str | None]) -> TaskScore:
    asked, wrong = len(failures), [failure for failure in failures if failure is not None]
    share = 1 - len(wrong) / asked
    return TaskScore(
        kind=kind,
        asked=asked,
        right=asked - len(wrong),
        error=math.sqrt(share * (1 - share) / asked),
        failures=tuple(wrong[:_KEPT_FAILURES]),
    )


def _failure(runtime: Runtime, task: Task) -> str | None:
    """Why the answer is wrong; None when it is right."""
    if isinstance(task, Choice):
        chosen = likeliest(runtime, task.prompt, task.choices)
        return None if chosen == task.answer else f"chose {clip(task.choices[chosen])}"
    if isinstance(task, Exact):
        options: Any = {"max_tokens": task.max_tokens, "temperature": 0.0}
        if task.messages is not None:
            answer = runtime.chat(task.messages, **options)
        else:
            answer = runtime.generate(task.prompt or "", **options)
        return None if answer.text.strip().startswith(task.answer.strip()) else f"said {clip(answer.text.strip())}"
    answer = runtime.chat(task.messages, tools=list(task.tools), max_tokens=task.max_tokens, temperature=0.0)
    return tool_failure(answer.text, [(call.name, call.arguments) for call in answer.tool_calls], task)


def tool_failure(text: str, calls: Sequence[tuple[str, Mapping[str, Any]]], task: Tool) -> str | None:
    """Why an answer is no valid call of a tool; None when it is."""
    if not calls:
        return f"no tool call in {clip(text.strip())}"
    described = [tool.get("function", tool) for tool in task.tools]
    schemas = {str(one.get("name")): one.get("parameters", {}) for one in described if isinstance(one, Mapping)}
    for name, arguments in calls:
        if task.expected is not None and name != task.expected:
            return f"called {clip(name)}, expected {clip(task.expected)}"
        broken = violation(arguments, schemas.get(name, {}))
        if broken:
            return f"{name}: {broken} in {clip(json.dumps(arguments))}"
    return None


def likeliest(runtime: Runtime, prompt: str, choices: Sequence[str]) -> int:
    """The choice whose tokens are the likeliest on average, after the prompt."""
    found = []
    for choice in choices:
        whole = runtime.encode(prompt + choice)
        before = _shared(whole, runtime.encode(prompt))
        rows = _rows(runtime, whole)
        logs = log_softmax(rows[before - 1 : len(whole) - 1])
        following = np.array(whole[before:], np.int64)
        found.append(float(logs[np.arange(len(following)), following].mean()) if len(following) else -math.inf)
    return int(np.argmax(found))


def _shared(whole: Sequence[int], prompt: Sequence[int]) -> int:
    """Where the choice's own tokens begin: a token may join the end of the prompt with the choice."""
    same = 0
    while same < min(len(whole), len(prompt)) and whole[same] == prompt[same]:
        same += 1
    return max(1, min(same, len(whole) - 1))


def _rows(runtime: Runtime, tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    engine = runtime.engine
    if len(tokens) > runtime.storage.capacity_tokens:
        raise InvalidInput(
            f"a task of {len(tokens)} tokens, and the artifact holds {runtime.storage.capacity_tokens}; shorten it"
        )
    state = engine.start(runtime.storage)
    try:
        rows, step = [], engine.abilities.max_chunk_tokens
        for start in range(0, len(tokens), step):
            chunk = tokens[start : start + step]
            rows.append(np.array(engine.forward([Chunk(state, chunk, len(chunk))])[0], dtype=np.float32))
        return np.concatenate(rows)
    finally:
        state.close()
