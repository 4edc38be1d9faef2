"""Local tasks: strict reading, scoring with the model, and tool calls validated against their schema."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import measured
import pytest
import runtimes

from edgekit.apps.bench.eval import tool_schemas
from edgekit.apps.bench.eval.local_tasks import (
    ChoiceTask,
    ExactTask,
    ToolTask,
    likeliest,
    read_tasks,
    score,
    tool_failure,
)
from edgekit.apps.bench.eval.tool_schemas import check_schema, violation

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 1}, "days": {"type": "integer", "maximum": 7}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
MESSAGES = ({"role": "user", "content": "Weather?"},)


def test_tasks_are_read_one_a_line_and_an_error_names_the_line(tmp_path: Path) -> None:
    place = tmp_path / "tasks.jsonl"
    lines = [
        {"kind": "choice", "prompt": "a", "choices": ["b", "c"], "answer": 1},
        {"kind": "exact", "prompt": "a", "answer": "b"},
        {"kind": "tool", "messages": list(MESSAGES), "tools": [WEATHER]},
    ]
    place.write_text("\n\n".join(map(json.dumps, lines)))
    assert [task.kind for task in read_tasks(place)] == ["choice", "exact", "tool"]
    for broken, said in (
        ({**lines[0], "answer": 2}, ":1: answer 2"),
        ({**lines[1], "messages": list(MESSAGES)}, ":1: give either"),
        ({**lines[1], "spelling": 1}, ":1: exact.spelling"),
        ({"kind": "essay"}, ":1: kind: 'essay' is not among 'choice', 'exact', 'tool'"),
        ({"prompt": 3}, ":1: kind: is missing"),
    ):
        place.write_text(json.dumps(broken))
        assert said in measured.refused(lambda: read_tasks(place))
    place.write_text("\n")
    assert "holds no task" in measured.refused(lambda: read_tasks(place))


def test_choices_and_answers_are_scored_with_the_model() -> None:
    with runtimes.make_runtime() as runtime:
        said = runtime.generate("the cat", max_tokens=6, temperature=0.0).text
        choices = (" sat on", " mat mat the", " cat")
        best = likeliest(runtime, "the cat", choices)
        tasks = [
            ChoiceTask(kind="choice", prompt="the cat", choices=choices, answer=best),
            ChoiceTask(kind="choice", prompt="the cat", choices=choices, answer=(best + 1) % 3),
            ExactTask(kind="exact", prompt="the cat", answer=said.strip()[:3] or "?", max_tokens=6),
            ExactTask(kind="exact", messages=MESSAGES, answer="nothing says this", max_tokens=4),
        ]
        choice, exact = score(runtime, tasks)
    assert (choice.kind, choice.asked, choice.right) == ("choice", 2, 1)
    assert (exact.asked, exact.right) == (2, 1)
    assert choice.failures[0].startswith("chose")
    assert exact.failures[0].startswith("said")
    assert choice.error == pytest.approx(0.5 / 2**0.5)


def test_a_tool_task_without_a_call_is_wrong() -> None:
    with runtimes.make_runtime() as runtime:
        (found,) = score(runtime, [ToolTask(kind="tool", messages=MESSAGES, tools=(WEATHER,), max_tokens=4)])
    assert (found.asked, found.right) == (1, 0)
    assert "no tool call" in found.failures[0]


@pytest.mark.parametrize(
    ("calls", "expected", "said"),
    [
        ([("weather", {"city": "Oslo", "days": 3})], "weather", None),
        ([("weather", {"days": 3})], None, "'city' is a required property"),
        ([("weather", {"city": "Oslo", "days": 30})], None, "greater than the maximum"),
        ([("weather", {"city": "Oslo", "country": "NO"})], None, "unexpected"),
        ([("weather", {"city": 5})], None, "is not of type 'string'"),
        ([("weather", {"city": "Oslo"})], "time", "expected 'time'"),
        ([], None, "no tool call"),
    ],
    ids=["right", "missing", "too many", "unknown", "wrong type", "wrong tool", "none"],
)
def test_calls_are_checked_against_their_schemas(calls: Any, expected: str | None, said: str | None) -> None:
    task = ToolTask(kind="tool", messages=MESSAGES, tools=(WEATHER,), expected=expected)
    found = tool_failure("text", calls, task)
    assert found is None if said is None else said in (found or "")


@pytest.mark.parametrize(
    ("value", "schema", "follows"),
    [
        (3, {"type": "integer"}, True),
        (3.0, {"type": "integer"}, True),
        (3.5, {"type": "integer"}, False),
        (True, {"type": "integer"}, False),
        (float("inf"), {"type": "integer"}, False),
        (None, {"type": ["string", "null"]}, True),
        (None, {"type": "string", "nullable": True}, True),
        ("b", {"enum": ["a", "b"]}, True),
        ("c", {"enum": ["a", "b"]}, False),
        ([1, "x"], {"type": "array", "items": {"type": "integer"}}, False),
        ([1], {"type": "array", "minItems": 2}, False),
        ("abc", {"pattern": "^a"}, True),
        ("abc", {"pattern": "^b"}, False),
        (5, {"anyOf": [{"type": "string"}, {"minimum": 3}]}, True),
        (5, {"oneOf": [{"type": "integer"}, {"minimum": 3}]}, False),
        (5, {"const": 6}, False),
        (5, {"exclusiveMinimum": 5}, False),
        ({"a": {"b": 1}}, {"properties": {"a": {"properties": {"b": {"type": "string"}}}}}, False),
        ({"a": 1}, {"additionalProperties": {"type": "string"}}, False),
        ({}, False, False),
    ],
)
def test_arguments_are_validated_against_schemas(value: Any, schema: Any, follows: bool) -> None:
    assert (violation(value, schema) is None) == follows


def test_a_violation_is_named_with_its_place() -> None:
    schema = {"properties": {"days": {"type": "array", "items": {"type": "integer"}}}}
    assert violation({"days": [1, "x"]}, schema) == """arguments.days[1]: "'x' is not of type 'integer'\""""


def test_references_stay_inside_the_schema() -> None:
    schema = {"$defs": {"day": {"type": "integer"}}, "properties": {"day": {"$ref": "#/$defs/day"}}}
    assert violation({"day": 3}, schema) is None and violation({"day": "x"}, schema) is not None
    for reference in ("#/x", "https://example.org/schema.json", "file:///etc/passwd"):
        said = measured.refused(lambda reference=reference: violation({}, {"$ref": reference}))
        assert reference.removeprefix("#") in said and "not in the schema" in said


def test_a_broken_schema_is_refused_by_name_and_before_any_answer() -> None:
    assert "'any'" in measured.refused(lambda: violation({}, {"type": "any"}))
    said = measured.refused(lambda: check_schema({"type": "any"}, "tool 'weather'"))
    assert said.startswith("tool 'weather': a tool's schema is not valid at $.type")


def test_without_jsonschema_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tool_schemas.validator_class.cache_clear()
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert "edgekit[eval]" in measured.refused(lambda: violation({}, {}))
