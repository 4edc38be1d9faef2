"""`/v1/chat/completions` as OpenAI's own client sees it: the answers are those of the Python API."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from serving import Served, serving

QUESTION: Any = [{"role": "user", "content": "the cat"}]


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "edgekit"


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 5, "top_p": 0.9}, {"seed": 2**62}])
def test_answers_are_those_of_the_python_api(served: Served, client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=20, **options)
    mine = served.runtime.chat(QUESTION, max_tokens=20, **{"temperature": 1.0, **options})
    assert whole.choices[0].message.content == mine.text
    assert whole.choices[0].finish_reason == mine.finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (mine.timings.prompt_tokens, 20)
    with client.chat.completions.create(
        model="tiny", messages=QUESTION, max_completion_tokens=20, stream=True, **options
    ) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == mine.text


def test_several_answers_share_the_prompt(served: Served, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=9, n=3, seed=4, temperature=1)
    texts = [choice.message.content for choice in whole.choices]
    assert texts == [
        served.runtime.chat(QUESTION, max_tokens=9, seed=4 + place, temperature=1.0).text for place in range(3)
    ]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 27
    streamed = ["", "", ""]
    ended = 0
    for chunk in client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=9, n=3, seed=4, temperature=1, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        ended += chunk.choices[0].finish_reason is not None
    assert streamed == texts
    assert ended == 3


def test_the_bytes_of_a_stream(served: Served) -> None:
    """Load generators and evaluators read lines by hand, so their form is part of the interface."""
    body = {"messages": QUESTION, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{served.v1}/chat/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "content-length" not in response.headers
        text = "".join(response.iter_text())
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") and "\n" not in line for line in events[:-1])
    chunks = [json.loads(line.removeprefix("data: ")) for line in events[:-2]]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-3:-1]] == [None, "length"]
    assert chunks[-2]["choices"][0]["delta"] == {}


def test_logprobs_are_those_of_the_model(served: Served, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    mine = served.runtime.chat(QUESTION, max_tokens=8, logprobs=2)
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content or []
    assert [entry.logprob for entry in entries] == [each.logprob for each in mine.logprobs]
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode("utf-8", "replace") == mine.text
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob >= entry.logprob for entry in entries)


def test_stop_strings_and_biases(served: Served, client: openai.OpenAI) -> None:
    text = served.runtime.chat(QUESTION, max_tokens=30).text
    middle = text[len(text) // 2 :][:2]
    whole = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=30, temperature=0, stop=[middle])
    assert whole.choices[0].message.content == text[: text.index(middle)]
    assert whole.choices[0].finish_reason == "stop"
    token = served.runtime.encode("cat", add_special_tokens=False)[0]
    biased = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=3, temperature=0, logit_bias={str(token): 100}
    )
    assert biased.choices[0].message.content == "catcatcat"


class Flag(BaseModel):
    """What the model must fill in."""

    ok: bool


def test_a_forced_call_follows_its_schema_and_streams_as_deltas(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    parameters = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("warm", "cold")
    ]
    asked: Any = {"model": "tiny", "messages": QUESTION, "tools": tools, "seed": 1, "temperature": 1}
    whole = client.chat.completions.create(**asked, tool_choice={"type": "function", "function": {"name": "cold"}})
    message = whole.choices[0].message
    assert (message.content, whole.choices[0].finish_reason) == (None, "tool_calls")
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "cold"
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")
    deltas = [
        each
        for chunk in client.chat.completions.create(**asked, tool_choice="required", stream=True)
        for each in chunk.choices[0].delta.tool_calls or ()
    ]
    assert len(deltas) > 3  # the arguments stream as they are written
    assert [delta.id is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert deltas[0].function is not None
    assert deltas[0].function.name in ("warm", "cold")
    assert json.loads("".join(each.function.arguments or "" for each in deltas if each.function))["unit"] in ("C", "F")


def test_a_call_that_is_cut_short_is_no_call(served: Served, client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    tools: Any = [{"type": "function", "function": {"name": "cold", "parameters": {"type": "object"}}}]
    asked: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked, tools=tools, tool_choice="required").choices[0]
    assert (whole.finish_reason, whole.message.tool_calls) == ("length", None)
    described = [{"name": "cold", "input_schema": {"type": "object"}}]
    more = {"tools": described, "tool_choice": {"type": "any"}}
    message = httpx.post(f"{served.v1}/messages", json={**asked, **more}).json()
    assert (message["stop_reason"], message["content"]) == ("max_tokens", [])


def test_a_schema_is_followed_and_parsed_by_the_client(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    whole = client.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Flag, seed=1)
    assert whole.choices[0].message.parsed is not None
    assert whole.choices[0].message.parsed.ok in (True, False)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "judge", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": "x"}}, "template_options"),
    ({"edgekit": {"tenant": "other"}}, "edgekit.tenant"),
]


@pytest.mark.parametrize(("change", "param"), REFUSED)
def test_unsupported_fields_are_refused_by_name(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 1, **change}
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/chat/completions", body=body, cast_to=object)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_a_prompt_that_does_not_fit_has_its_own_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "the cat " * 600}])
    assert refused.value.code == "context_length_exceeded"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert refused.value.code == "model_not_found"


def test_fields_without_effect_are_named_and_null_is_absent(served: Served) -> None:
    body = {
        "model": "tiny",
        "messages": QUESTION,
        "max_tokens": 1.0,
        "stop": None,
        "seed": None,
        "zebra": 1,
        "store": True,
        "user": None,
    }
    response = httpx.post(f"{served.v1}/chat/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-edgekit-ignored"] == "zebra,store"


def test_aliases_name_models_and_strict_servers_refuse_unknown_fields() -> None:
    with serving(aliases={"gpt-*": "tiny"}, strict=True) as served:
        answered = httpx.post(
            f"{served.v1}/chat/completions", json={"model": "gpt-4o", "messages": QUESTION, "max_tokens": 1}
        )
        assert answered.json()["model"] == "tiny"
        refused = httpx.post(f"{served.v1}/chat/completions", json={"messages": QUESTION, "zebra": 1})
        assert refused.json()["error"]["param"] == "zebra"


def test_system_messages_at_the_start_are_joined(served: Served, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, *QUESTION]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, temperature=0)
    mine = served.runtime.chat([{"role": "system", "content": "a\n\nb"}, *QUESTION], max_tokens=5)
    assert whole.choices[0].message.content == mine.text
