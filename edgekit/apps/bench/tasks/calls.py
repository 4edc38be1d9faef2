"""Function calling: the model gets a request and functions, and its calls are compared with the expected ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgekit import ToolCall, parse_tool_calls
from edgekit.apps.bench.tasks.data_sets import CALL_ANSWERS, CALL_QUESTIONS, records
from edgekit.apps.bench.tasks.task import Judgement, ModelInput, PublicTask, TaskAnswer
from edgekit.apps.bench.wheel_data import fetch
from edgekit.errors import quote_short

_SYSTEM = (
    "You can call functions. They are described here as JSON, one on a line:\n{tools}\n"
    'For each call that the request needs, write <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call> and '
    "nothing else. If no function fits the request, answer in words."
)
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
_MAX_DEPTH = 16


class FunctionCalls(PublicTask):
    """Single calls, calls of one of several functions, several calls, and requests that no function fits."""

    name, title, version = "calls", "function calls with their arguments", 1
    data = (*CALL_QUESTIONS.values(), *CALL_ANSWERS.values())
    runs_code, needs_chat = False, True

    def items(self) -> dict[str, dict[str, Any]]:
        fetch(self.data)  # all at once: one wheel holds them
        return {item["id"]: item for item in self._items()}

    def _items(self) -> Iterator[dict[str, Any]]:
        for group, data in CALL_QUESTIONS.items():
            answers = (
                {answer["id"]: answer["ground_truth"] for answer in records(CALL_ANSWERS[group])}
                if (group in CALL_ANSWERS)
                else {}
            )
            for question in records(data):
                yield question | {"group": group, "expected": answers.get(question["id"], [])}

    def group(self, item: Mapping[str, Any]) -> str:
        return str(item["group"])

    def ask(self, item: Mapping[str, Any], *, chat: bool, tools: bool) -> ModelInput:
        functions = [{**each, "parameters": _schema(each["parameters"])} for each in item["function"]]
        described = [{"type": "function", "function": each} for each in functions]
        messages = [dict(message) for message in item["question"][0]]
        if tools:
            return ModelInput(messages, max_tokens=256, tools=tuple(described))
        listed = "\n".join(json.dumps(each["function"]) for each in described)
        system = _SYSTEM.format(tools=listed)
        if messages[0]["role"] == "system":
            system += "\n" + messages.pop(0)["content"]
        return ModelInput([{"role": "system", "content": system}, *messages], max_tokens=256)

    def judge(self, item: Mapping[str, Any], answer: TaskAnswer) -> Judgement:
        functions = {each["name"]: each for each in item["function"]}
        calls = parse_tool_calls(answer.text, functions.keys()).calls
        why = difference(calls, item["expected"], functions)
        return Judgement(why is None, why or "")


def difference(
    calls: Sequence[ToolCall], expected: Sequence[Mapping[str, Any]], functions: Mapping[str, Mapping[str, Any]]
) -> str | None:
    """Return the first difference between the calls and the expected ones, in any order; None if they match."""
    if len(calls) != len(expected):
        return f"{len(calls)} calls where {len(expected)} are right"
    reasons = [[_call_difference(call, one, functions) for call in calls] for one in expected]
    if _can_pair([[reason is None for reason in row] for row in reasons]):
        return None
    return next(reason for row in reasons for reason in row if reason is not None)


def _can_pair(fits: Sequence[Sequence[bool]]) -> bool:
    """Return whether the rows can be matched to different columns (augmenting paths)."""
    row_of: dict[int, int] = {}

    def place(row: int, seen: set[int]) -> bool:
        for column, fit in enumerate(fits[row]):
            if fit and column not in seen:
                seen.add(column)
                if column not in row_of or place(row_of[column], seen):
                    row_of[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(fits)))


def _call_difference(
    call: ToolCall, expected: Mapping[str, Any], functions: Mapping[str, Mapping[str, Any]]
) -> str | None:
    ((name, parameters),) = expected.items()
    if call.name != name:
        return f"called {quote_short(call.name)} where {quote_short(name)} is right"
    required = functions[name]["parameters"].get("required", ())
    for key, value in call.arguments.items():
        if key not in parameters:
            return f"{name}: {quote_short(key)} is not expected"
        if not any(_same(value, allowed) for allowed in parameters[key]):
            return f"{name}: {quote_short(key)} is {quote_short(value)}"
    for key, allowed in parameters.items():
        if key not in call.arguments and (key in required or "" not in allowed):
            return f"{name}: {quote_short(key)} is missing"
    return None


def _same(value: Any, allowed: Any, depth: int = 0) -> bool:
    """Return whether `value` equals `allowed`. Texts are compared without case, spaces and punctuation.

    An allowed object maps each key to its allowed values; "" among them means that the key is optional.
    """
    if depth > _MAX_DEPTH:
        return False
    if isinstance(allowed, bool) or isinstance(value, bool):
        return value is allowed
    if isinstance(allowed, int | float):
        return isinstance(value, int | float) and value == allowed
    if isinstance(allowed, str):
        return isinstance(value, str) and _folded(value) == _folded(allowed)
    if isinstance(allowed, list):
        same_length = isinstance(value, list) and len(value) == len(allowed)
        return same_length and all(_same(one, other, depth + 1) for one, other in zip(value, allowed, strict=True))
    if isinstance(allowed, dict):
        if not isinstance(value, dict) or not value.keys() <= allowed.keys():
            return False
        return all(
            any(_same(value[key], one, depth + 1) for one in choices) if key in value else "" in choices
            for key, choices in ((key, each if isinstance(each, list) else [each]) for key, each in allowed.items())
        )
    return bool(value == allowed)


def _folded(text: str) -> str:
    return re.sub(r"[\s,./_*^-]", "", text).replace("'", '"').lower()


def _schema(value: Any) -> Any:
    """Convert types from the data set's Python names to JSON schema's."""
    if isinstance(value, list):
        return [_schema(each) for each in value]
    if not isinstance(value, dict):
        return value
    changed = {key: _schema(each) for key, each in value.items()}
    kind = value.get("type")
    if isinstance(kind, str) and kind in _TYPES:
        changed["type"] = _TYPES[kind]
        if changed["type"] is None:
            del changed["type"]
    return changed
