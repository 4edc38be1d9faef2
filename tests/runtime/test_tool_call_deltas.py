"""Streamed arguments of tool calls: joined, they equal the arguments of the finished calls."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekit.runtime.generation.tool_call_deltas import ToolCallDelta
from edgekit.runtime.generation.tool_call_formats import ToolCall
from edgekit.runtime.generation.tool_calls import ToolCallReader

NAMES = ("weather", "add")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def read(text: str, cuts: list[int]) -> tuple[list[ToolCallDelta], list[ToolCall], list[int]]:
    """The deltas and the calls of a text in pieces, and the number of pieces that brought deltas."""
    reader = ToolCallReader(NAMES, "seed")
    deltas: list[ToolCallDelta] = []
    calls: list[ToolCall] = []
    brought = []
    places = [0, *sorted(cuts), len(text)]
    for start, stop in pairwise(places):
        calls += reader.push(text[start:stop])
        new = reader.deltas()
        brought += [len(new)] if new else []
        deltas += new
    calls += reader.finish()
    deltas += reader.deltas()
    return deltas, calls, brought


def agree(deltas: list[ToolCallDelta], calls: list[ToolCall]) -> None:
    for index, call in enumerate(calls):
        own = [delta for delta in deltas if delta.index == index]
        assert json.loads("".join(delta.arguments for delta in own)) == call.arguments
        assert {(delta.id, delta.name) for delta in own} == {(call.id, call.name)}
    assert {delta.index for delta in deltas} == set(range(len(calls)))


def one(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


WRITTEN = [
    lambda a, b: f"<tool_call>\n{one('weather', a)}\n</tool_call>\n<tool_call>{one('add', b)}</tool_call>",
    lambda a, b: f"Let me look.<tool_call>{one('weather', a)}</tool_call><tool_call>{one('add', b)}",
    lambda a, b: f"[TOOL_CALLS][{one('weather', a)}, {one('add', b)}]",
    lambda a, b: f"[TOOL_CALLS]weather[ARGS]{json.dumps(a)}[TOOL_CALLS]add[ARGS]{json.dumps(b)}",
    lambda a, b: f"<|tool_call|>[{one('weather', a)}, {one('add', b)}]<|/tool_call|>",
    lambda a, b: f"<|python_tag|>{one('weather', a, 'parameters')}; {one('add', b, 'parameters')}",
    lambda a, b: f"[{one('weather', a)}, {one('add', b)}]",
    lambda a, b: json.dumps([{"type": "function", "function": {"name": "weather", "arguments": a}},
                             {"function": {"arguments": b, "name": "add"}}]),
]  # fmt: skip


@pytest.mark.parametrize("write", WRITTEN)
@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.text(max_size=6), VALUES, max_size=3), st.dictionaries(st.text(max_size=6), VALUES), st.data()
)
def test_the_parts_joined_are_the_arguments(write: Any, first: Any, second: Any, data: Any) -> None:
    text = write(first, second)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    deltas, calls, _ = read(text, cuts)
    agree(deltas, calls)


@pytest.mark.parametrize("write", WRITTEN)
@pytest.mark.parametrize(
    "marker", ["</tool_call>", "[TOOL_CALLS]", "<|/tool_call|>", "<|eom_id|>", "<tool_call>", '"</tool_call>\\', "```"]
)
def test_a_marker_inside_an_argument_ends_nothing(write: Any, marker: str) -> None:
    first, second = {"city": f"a {marker} b"}, {marker: [marker]}
    text = write(first, second)
    for cuts in ([], list(range(1, len(text))), list(range(3, len(text), 7))):
        deltas, calls, _ = read(text, cuts)
        assert [call.arguments for call in calls] == [first, second]
        agree(deltas, calls)


@pytest.mark.parametrize("write", WRITTEN[:7])
def test_arguments_come_while_they_are_written(write: Any) -> None:
    text = write({"city": "Bergen", "days": [1, 2]}, {"a": 1, "b": 2})
    deltas, calls, brought = read(text, list(range(1, len(text))))
    agree(deltas, calls)
    assert len(calls) == 2 and len(brought) > 30  # character by character, not at the end


def test_text_that_is_no_call_has_no_deltas() -> None:
    for text in ("Hello {there}", '{"name": "unknown", "arguments": {"a": 1}}', "[1, 2]", '<tool_call>{"name": 3}'):
        deltas, calls, _ = read(text, [random.Random(text).randrange(len(text))])
        assert not deltas and not calls


def test_arguments_as_python_come_at_the_end() -> None:
    deltas, calls, _ = read('[weather(city="Oslo")]', [5])
    agree(deltas, calls)
    assert len(deltas) == 1
