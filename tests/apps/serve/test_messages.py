"""`/v1/messages` as Anthropic's own client sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from runtimes import make_runtime
from serving import Served, serving

from edgekit.runtime.generation.chat_template import ChatTemplate

QUESTION: Any = [{"role": "user", "content": "the cat"}]
TOOL: Any = {
    "name": "cold",
    "input_schema": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving({"tiny": make_runtime(prefix_bytes=1 << 20)}, aliases={"claude-*": "tiny"}) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as found:
        yield found


def test_a_message_is_the_answer_of_the_python_api(served: Served, client: anthropic.Anthropic) -> None:
    asked = [{"role": "system", "content": "be brief"}, *QUESTION]
    mine = served.runtime.chat(asked, max_tokens=20)
    whole = client.messages.create(
        model="claude-x", max_tokens=20, messages=QUESTION, system="be brief", extra_body={"temperature": 0}
    )
    (block,) = whole.content
    assert block.type == "text"
    assert (block.text, whole.stop_reason, whole.model) == (mine.text, "max_tokens", "tiny")
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == mine.timings.prompt_tokens
    assert whole.usage.output_tokens == 20
    counted = client.messages.count_tokens(model="tiny", messages=QUESTION, system="be brief")
    assert counted.input_tokens == mine.timings.prompt_tokens


def test_a_stream_adds_up_to_the_message(served: Served, client: anthropic.Anthropic) -> None:
    mine = served.runtime.chat(QUESTION, max_tokens=15, temperature=0.8, seed=3)
    with client.messages.stream(
        model="tiny", max_tokens=15, messages=QUESTION, extra_body={"temperature": 0.8, "edgekit": {"seed": 3}}
    ) as stream:
        assert "".join(stream.text_stream) == mine.text
        assert stream.get_final_message().usage.output_tokens == 15
    body = {"messages": QUESTION, "max_tokens": 3, "stream": True, "temperature": 0}
    lines = httpx.post(f"{served.v1}/messages", json=body).text.split("\n")
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}


def test_the_stop_sequence_is_named(served: Served, client: anthropic.Anthropic) -> None:
    text = served.runtime.chat(QUESTION, max_tokens=30).text
    middle = text[len(text) // 2 :][:2]
    whole = client.messages.create(
        model="tiny",
        max_tokens=30,
        messages=QUESTION,
        stop_sequences=["nowhere", middle],
        extra_body={"temperature": 0},
    )
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", middle)


def test_a_forced_call_is_a_block(client: anthropic.Anthropic) -> None:
    pytest.importorskip("llguidance")
    asked: Any = {
        "model": "tiny",
        "max_tokens": 200,
        "messages": QUESTION,
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
    }
    whole = client.messages.create(**asked)
    (block,) = whole.content
    assert (block.type, whole.stop_reason) == ("tool_use", "tool_use")
    assert block.type == "tool_use"
    assert block.input["unit"] in ("C", "F")
    with client.messages.stream(**asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input["unit"] in ("C", "F")  # type: ignore[index]


def test_results_and_thoughts_of_earlier_turns_are_rendered(client: anthropic.Anthropic) -> None:
    messages: Any = [
        *QUESTION,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "cold", "input": {"unit": "C"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "3"}]},
                {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    assert client.messages.create(model="tiny", max_tokens=2, messages=messages, tools=[TOOL]).usage.output_tokens == 2


def test_billing_line_does_not_prevent_prefix_hits(client: anthropic.Anthropic) -> None:
    for number in range(2):
        system: Any = [
            {"type": "text", "text": f"x-anthropic-billing-header: cch={number};\n"},
            {"type": "text", "text": "be brief and kind and good"},
        ]
        whole = client.messages.create(model="tiny", max_tokens=1, messages=QUESTION, system=system)
    assert whole.usage.input_tokens == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, anthropic.BadRequestError),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "x"}]}, anthropic.BadRequestError),
        ({"tool_choice": {"type": "tool", "name": "x"}}, anthropic.BadRequestError),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError),
        ({"model": "other"}, anthropic.NotFoundError),
    ],
)
def test_refusals_have_the_form_of_the_api(
    client: anthropic.Anthropic, change: dict[str, Any], error: type[Any]
) -> None:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 1, **change}
    with pytest.raises(error) as refused:
        client.post("/v1/messages", body=body, cast_to=object)
    assert refused.value.body["type"] == "error" and set(refused.value.body["error"]) == {"type", "message"}
    assert "tools" not in change or "tools.0.type: tools of type 'web_search_20250305'" in str(refused.value)


def test_a_thinking_budget_ends_the_thinking() -> None:
    runtime = make_runtime()
    runtime.template = ChatTemplate(
        {"default": "{% for message in messages %}{{ message.content }}{% endfor %}<think>"}, {}
    )
    mine = runtime.chat(QUESTION, max_tokens=30, thinking_tokens=4, temperature=0)
    assert mine.reasoning
    assert mine.content
    with serving({"tiny": runtime}) as served:
        asked = {"messages": QUESTION, "max_tokens": 30, "temperature": 0}
        thinking = {"type": "enabled", "budget_tokens": 4}
        blocks = httpx.post(f"{served.v1}/messages", json={**asked, "thinking": thinking}).json()["content"]
        assert [blocks[0]["thinking"], blocks[1]["text"]] == [mine.reasoning, mine.content]
        for field in ({"thinking_token_budget": 4}, {"edgekit": {"thinking_tokens": 4}}):
            message = httpx.post(f"{served.v1}/chat/completions", json={**asked, **field}).json()["choices"][0][
                "message"
            ]
            assert (message["reasoning_content"], message["content"]) == (mine.reasoning, mine.content)
        refused = httpx.post(f"{served.v1}/messages", json={**asked, "thinking": {**thinking, "budget_tokens": -1}})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
