"""Tasks from a local jsonl: choices by likelihood, exact answers, and tool calls that must follow their schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from edgekit import Runtime
from edgekit.apps.bench.eval.evaluation import TaskScore
from edgekit.apps.bench.eval.tool_schemas import violation
from edgekit.common.base import Frozen
from edgekit.common.parsing import read_bytes, sentence_of
from edgekit.errors import InvalidInput, quote_short

_MAX_TASKS_BYTES = 64 << 20
_MAX_TASKS = 100_000
_KEPT_FAILURES = 20

_Prompt = Annotated[str, Field(min_length=1, max_length=1 << 20)]
_Messages = Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=256)]


class ChoiceTask(Frozen):
    """A multiple choice, answered by the continuation with the highest mean log-probability per token."""

    kind: Literal["choice"]
    prompt: _Prompt
    choices: Annotated[tuple[str, ...], Field(min_length=2, max_length=64)]
    answer: Annotated[int, Field(ge=0)]


class ExactTask(Frozen):
    """The greedy answer must begin with the expected one; surrounding white space is ignored."""

    kind: Literal["exact"]
    prompt: _Prompt | None = None
    messages: _Messages | None = None
    answer: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 64


class ToolTask(Frozen):
    """The greedy answer must call a tool with arguments that match the tool's schema."""

    kind: Literal["tool"]
    messages: _Messages
    tools: Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=64)]
    expected: str | None = None  # the name of the only right tool; None: any tool
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 256


Task = ChoiceTask | ExactTask | ToolTask
_TASK: TypeAdapter[Task] = TypeAdapter(Annotated[Task, Field(discriminator="kind")])


def read_tasks(path: Path) -> list[Task]:
    """Read tasks, one on a line; an error names the line."""
    tasks: list[Task] = []
    for number, line in enumerate(read_bytes(path, _MAX_TASKS_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = _TASK.validate_json(line)
        except ValidationError as error:
            raise InvalidInput(f"{path}:{number}: {sentence_of(error)}") from error
        if isinstance(task, ChoiceTask) and task.answer >= len(task.choices):
            raise InvalidInput(f"{path}:{number}: answer {task.answer} is none of {len(task.choices)} choices")
        if isinstance(task, ExactTask) and (task.prompt is None) == (task.messages is None):
            raise InvalidInput(f"{path}:{number}: give either prompt or messages")
        tasks.append(task)
        if len(tasks) > _MAX_TASKS:
            raise InvalidInput(f"{path}: more than {_MAX_TASKS:,} tasks; split the file")
    if not tasks:
        raise InvalidInput(f"{path}: holds no task; write one JSON object per line")
    return tasks


def score(runtime: Runtime, tasks: Sequence[Task]) -> tuple[TaskScore, ...]:
    """Run the tasks and return one score per kind."""
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
    """Return why the answer is wrong, or None if it is right."""
    if isinstance(task, ChoiceTask):
        chosen = likeliest(runtime, task.prompt, task.choices)
        return None if chosen == task.answer else f"chose {quote_short(task.choices[chosen])}"
    if isinstance(task, ExactTask):
        options: Any = {"max_tokens": task.max_tokens, "temperature": 0.0}
        if task.messages is not None:
            answer = runtime.chat(task.messages, **options)
        else:
            answer = runtime.generate(task.prompt or "", **options)
        return (
            None if answer.text.strip().startswith(task.answer.strip()) else f"said {quote_short(answer.text.strip())}"
        )
    answer = runtime.chat(task.messages, tools=list(task.tools), max_tokens=task.max_tokens, temperature=0.0)
    return tool_failure(answer.text, [(call.name, call.arguments) for call in answer.tool_calls], task)


def tool_failure(text: str, calls: Sequence[tuple[str, Mapping[str, Any]]], task: ToolTask) -> str | None:
    """Return why an answer is not a valid tool call, or None if it is."""
    if not calls:
        return f"no tool call in {quote_short(text.strip())}"
    described = [tool.get("function", tool) for tool in task.tools]
    schemas = {str(one.get("name")): one.get("parameters", {}) for one in described if isinstance(one, Mapping)}
    for name, arguments in calls:
        if task.expected is not None and name != task.expected:
            return f"called {quote_short(name)}, expected {quote_short(task.expected)}"
        broken = violation(arguments, schemas.get(name, {}))
        if broken:
            return f"{name}: {broken} in {quote_short(json.dumps(arguments))}"
    return None


def likeliest(runtime: Runtime, prompt: str, choices: Sequence[str]) -> int:
    """Return the index of the choice with the highest mean log-probability per token after the prompt."""
    return int(np.argmax([score.mean for score in runtime.score(prompt, choices)]))
