"""`/v1/responses` as OpenAI's own client sees it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from serving import Served

QUESTION: Any = [{"role": "user", "content": "the cat"}]


def test_a_response_is_the_answer_of_the_python_api(served: Served, client: openai.OpenAI) -> None:
    mine = served.runtime.chat([{"role": "system", "content": "be brief"}, *QUESTION], max_tokens=20)
    whole = client.responses.create(
        model="tiny", input="the cat", instructions="be brief", temperature=0, max_output_tokens=20
    )
    assert whole.output_text == mine.text
    assert (whole.status, whole.store) == ("incomplete", False)
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (mine.timings.prompt_tokens, 20)
    parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the cat"}]}]
    again = client.responses.create(
        model="tiny",
        input=parts,
        instructions="be brief",
        temperature=0,
        max_output_tokens=20,  # type: ignore[arg-type]
    )
    assert again.output_text == mine.text


def test_the_events_of_a_stream(served: Served, client: openai.OpenAI) -> None:
    mine = served.runtime.chat(QUESTION, max_tokens=10)
    with client.responses.stream(model="tiny", input=QUESTION, temperature=0, max_output_tokens=10) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == mine.text
    raw = httpx.post(f"{served.v1}/responses", json={"input": "a", "max_output_tokens": 1, "stream": True}).text
    first = raw.split("\n\n")[0].split("\n")
    assert first[0] == "event: response.created"
    assert json.loads(first[1].removeprefix("data: "))["type"] == "response.created"
    assert raw.endswith("data: [DONE]\n\n")


def test_a_forced_call_is_an_item(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    parameters = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
    tools: Any = [
        {"type": "function", "name": "cold", "parameters": parameters, "strict": True},
        {"type": "web_search"},
    ]
    answered = client.responses.with_raw_response.create(
        model="tiny", input="the cat", tools=tools, tool_choice="required"
    )
    assert answered.headers["x-edgekit-ignored-tools"] == "web_search"
    (item,) = answered.parse().output
    assert item.type == "function_call"
    assert json.loads(item.arguments)["unit"] in ("C", "F")
    kinds = [
        event.type
        for event in client.responses.create(model="tiny", input="a", tools=tools, tool_choice="required", stream=True)
    ]
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]


def test_a_conversation_with_calls_is_rendered(served: Served, client: openai.OpenAI) -> None:
    items: Any = [
        *QUESTION,
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "call_1", "name": "cold", "arguments": '{"unit": "C"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "3"},
    ]
    assert client.responses.create(model="tiny", input=items, max_output_tokens=2).output_text


@pytest.mark.parametrize(
    "change",
    [
        {"input": []},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]},
        {"background": True},
        {"conversation": "c"},
        {"n": 2},
        {"text": {"format": {"type": "json_schema"}}},
        {"tools": [{"type": "function"}]},
        {"tool_choice": {"type": "function", "name": "none"}},
    ],
)
def test_unsupported_fields_are_refused(client: openai.OpenAI, change: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client.post("/responses", body={"input": "a", "max_output_tokens": 1, **change}, cast_to=object)


def test_previous_response_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="tiny", input="a", previous_response_id="resp_1")
    assert refused.value.code == "previous_response_not_found"
