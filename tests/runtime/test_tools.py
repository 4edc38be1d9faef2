"""Tools: calls in answers, whole and as deltas."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from edgekit.runtime.generation.tool_call_deltas import ToolCallDelta
from edgekit.runtime.generation.tool_call_formats import ToolCall
from edgekit.runtime.generation.tool_calls import ToolCallReader, parse_tool_calls, tool_names

NAMES = {"weather", "add"}


PARIS = {"place": "Paris"}


WEATHER = '{"name": "weather", "arguments": {"place": "Paris"}}'


ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}'


ONE = {
    "Hermes": f"<tool_call>\n{WEATHER}\n</tool_call>",
    "Hermes, cut before its end mark": f"<tool_call>\n{WEATHER}\n",
    "Hermes, with doubled braces": f"<tool_call>{{{WEATHER}}}}}</tool_call>",
    "arguments as a string": '<tool_call>{"name": "weather", "arguments": "{\\"place\\": \\"Paris\\"}"}</tool_call>',
    "nested under function": f'<tool_call>{{"type": "function", "function": {WEATHER}}}</tool_call>',
    "Llama 3, bare": '{"name": "weather", "parameters": {"place": "Paris"}}',
    "Llama 3, tagged": '<|python_tag|>{"name": "weather", "parameters": {"place": "Paris"}}<|eom_id|>',
    "Llama 3, tagged call": '<|python_tag|>weather.call(place="Paris")',
    "Llama 3.2, Python list": '[weather(place="Paris")]',
    "Mistral": f"[TOOL_CALLS] [{WEATHER}]",
    "Mistral, with id": '[TOOL_CALLS][{"name": "weather", "arguments": {"place": "Paris"}, "id": "a12345678"}]',
    "Mistral, newer": '[TOOL_CALLS]weather[ARGS]{"place": "Paris"}',
    "Mistral, newer with id": '[TOOL_CALLS]weather[CALL_ID]abc123[ARGS]{"place": "Paris"}',
    "Phi-4": f"<|tool_call|>[{WEATHER}]<|/tool_call|>",
    "Phi-4, functools": f"functools[{WEATHER}]",
    "Gemma, Python block": '```tool_code\nprint(weather(place="Paris"))\n```',
    "Gemma, plain call": "```tool_code\nweather(place='Paris')\n```",
    "JSON block": f"```json\n{WEATHER}\n```",
}


@pytest.mark.parametrize("text", ONE.values(), ids=ONE)
def test_one_call_is_found(text: str) -> None:
    found = parse_tool_calls(text, NAMES)
    assert [(call.name, call.arguments) for call in found.calls] == [("weather", PARIS)]
    assert found.content == ""


SEVERAL = {
    "Hermes": f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{ADD}</tool_call>",
    "Mistral": f"[TOOL_CALLS][{WEATHER}, {ADD}]",
    "Mistral, newer": '[TOOL_CALLS]weather[ARGS]{"place": "Paris"}[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, {"c": "}"}]}',
    "Phi-4": f"<|tool_call|>[{WEATHER}, {ADD}]<|/tool_call|>",
    "Llama 3": f"{WEATHER}; {ADD}",
    "Python": '[weather(place="Paris"), add(a=1, b=[2, {"c": "}"}])]',
}


@pytest.mark.parametrize("text", SEVERAL.values(), ids=SEVERAL)
def test_several_calls_are_found_in_order(text: str) -> None:
    assert [call.name for call in parse_tool_calls(text, NAMES).calls] == ["weather", "add"]
    assert parse_tool_calls(text, NAMES).calls[1].arguments == {"a": 1, "b": [2, {"c": "}"}]}


def test_text_around_a_call_is_kept() -> None:
    found = parse_tool_calls(f"I look it up.\n<tool_call>{WEATHER}</tool_call>\nWait.", NAMES)
    assert found.content == "I look it up.\n\nWait." and len(found.calls) == 1


NO_CALL = {
    "text": "It is sunny in Paris.",
    "an unknown tool": '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    "JSON that is an answer": '{"answer": 42}',
    "a list that is an answer": "[1, 2, 3]",
    "cut in the middle": '<tool_call>{"name": "weather", "argum',
    "arguments that are no object": '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
    "a name that is no string": '{"name": 5, "arguments": {}}',
    "a name that is a list": '{"name": ["weather"], "arguments": {}}',
    "arguments by place": "[weather('Paris')]",
    "a computed argument": "[weather(place=open('/etc/passwd').read())]",
    "a code block that does more": "```python\nimport os\nweather(place='Paris')\n```",
    "spread arguments": "[weather(**{'place': 'Paris'})]",
    "nothing": "",
    "deep JSON": "[" * 100_000,
    "deep Python": "[" + "(" * 5_000,
}


@pytest.mark.parametrize("text", NO_CALL.values(), ids=NO_CALL)
def test_text_that_is_no_call_is_unchanged(text: str) -> None:
    assert parse_tool_calls(text, NAMES) == (text, ())


def test_names_are_read_from_both_ways_of_describing_a_tool() -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}, {"name": "add"}, {}, {"function": 5}]
    assert tool_names(tools) == NAMES


@pytest.mark.parametrize("count", [7, 300, 1500, 20_000])
def test_a_name_of_many_parts_calls_nothing(count: int) -> None:
    text = f"```tool_code\nweather{'.b' * count}(x=1)\n```"
    assert parse_tool_calls(text, NAMES).calls == ()


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
    lambda a, b: f"<tool_call>{{{one('weather', a)}}}</tool_call><tool_call>{{{one('add', b)}}}</tool_call>",
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
    assert [call.arguments for call in calls] == [first, second]
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


@pytest.mark.parametrize("write", WRITTEN[:8])
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
