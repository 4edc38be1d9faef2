"""`edgekit serve` with SmolLM2, driven by the official clients of three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from real_files import Export

import edgekit as api

anthropic = pytest.importorskip("anthropic")
ollama = pytest.importorskip("ollama")
openai = pytest.importorskip("openai")
serving = pytest.importorskip("serving")

pytestmark = [pytest.mark.real, pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow]
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def served(smollm2_file: Path, export: Export) -> Iterator[Any]:
    artifact = export(smollm2_file, "onnx", "--method", "rtn", "--exit", "15")
    runtime = api.open(artifact, exact=True, context=1024, sequences=4, prefixes="32MiB")
    with serving.serving({"smol": runtime}, ollama=True) as found:
        yield found


@contextmanager
def third(served: Any) -> Iterator[Any]:
    """Ollama's client, which has no `close`."""
    found = ollama.Client(host=served.url)
    try:
        yield found
    finally:
        found._client.close()


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0) as found:
        yield found


def test_three_clients_get_the_answer_of_the_python_api(served: Any, client: Any) -> None:
    mine = served.runtime.chat(QUESTION, max_tokens=24, temperature=0.7, seed=1)
    asked: dict[str, Any] = {"model": "smol", "max_tokens": 24, "messages": QUESTION}
    whole = client.chat.completions.create(**asked, temperature=0.7, seed=1)
    assert whole.choices[0].message.content == mine.text
    streamed = client.chat.completions.create(**asked, temperature=0.7, seed=1, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == mine.text
    with anthropic.Anthropic(base_url=served.url, api_key="none") as other:
        message = other.messages.create(**asked, extra_body={"temperature": 0.7, "edgekit": {"seed": 1}})
    assert message.content[0].text == mine.text
    options = {"temperature": 0.7, "seed": 1, "num_predict": 24}
    with third(served) as last:
        answer = last.chat("smol", QUESTION, options=options)
    assert answer.message.content == mine.text
    assert "Paris" in client.responses.create(model="smol", input=QUESTION, temperature=0).output_text


WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]},
}


def test_tools_are_called_in_three_apis_where_the_template_takes_none(served: Any, client: Any) -> None:
    pytest.importorskip("llguidance")
    tool: Any = {"type": "function", "function": WEATHER}
    asked: dict[str, Any] = {"model": "smol", "max_tokens": 100, "messages": QUESTION, "temperature": 0}
    whole = client.chat.completions.create(**asked, tools=[tool], tool_choice="required").choices[0]
    call = whole.message.tool_calls[0].function
    assert (whole.finish_reason, call.name, list(json.loads(call.arguments))) == ("tool_calls", "weather", ["city"])
    with client.chat.completions.stream(**asked, tools=[tool], tool_choice="required") as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as one:
        described = {"name": "weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
        choice = {"type": "tool", "name": "weather"}
        of_message = {"model": "smol", "max_tokens": 100, "messages": QUESTION, "extra_body": {"temperature": 0}}
        message = one.messages.create(**of_message, tools=[described], tool_choice=choice)
        assert message.stop_reason == "tool_use"
        assert message.content[-1].input == json.loads(call.arguments)
    result = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "sunny"}
    history = [*QUESTION, whole.message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(**{**asked, "messages": history, "max_tokens": 8}, tools=[tool])
    mine = served.runtime.chat(
        [
            *QUESTION,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "weather", "arguments": message.content[-1].input}}],
            },
            {"role": "tool", "content": "sunny"},
        ],
        tools=[tool],
        max_tokens=8,
    )
    assert (after.choices[0].message.content or "") == mine.content
    with third(served) as last:
        options = {"num_predict": 4, "temperature": 0}
        assert last.chat("smol", QUESTION, tools=[tool], options=options).done


def test_streams_of_three_clients_add_up_to_their_answers(served: Any, client: Any) -> None:
    mine = served.runtime.chat(QUESTION, max_tokens=16, temperature=0.7, seed=5).text
    asked: dict[str, Any] = {"model": "smol", "messages": QUESTION, "temperature": 0.7}
    chunks = client.chat.completions.create(**asked, max_tokens=16, seed=5, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == mine
    with (
        anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as one,
        one.messages.stream(
            model="smol", messages=QUESTION, max_tokens=16, extra_body={"temperature": 0.7, "edgekit": {"seed": 5}}
        ) as stream,
    ):
        assert "".join(stream.text_stream) == mine
    options = {"num_predict": 16, "temperature": 0.7, "seed": 5}
    with third(served) as last:
        lines = last.chat("smol", QUESTION, stream=True, options=options)
        assert "".join(line.message.content or "" for line in lines) == mine
    events = client.responses.create(
        model="smol", input="What is the capital of France?", max_output_tokens=16, temperature=0.7, stream=True,
        extra_body={"seed": 5},
    )  # fmt: skip
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == mine


def test_a_likelier_ending_has_the_higher_score(served: Any, client: Any) -> None:
    scores = []
    for ending in (" Paris.", " banana."):
        whole = client.completions.create(
            model="smol", prompt=f"The capital of France is{ending}", max_tokens=0, logprobs=1, echo=True
        )
        scores.append(sum(each for each in whole.choices[0].logprobs.token_logprobs if each is not None))
    assert scores[0] > scores[1]
    mine = served.runtime.prompt_logprobs("The capital of France is banana.")
    assert scores[1] == pytest.approx(mine.total)
