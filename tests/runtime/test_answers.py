"""The Python API of answers: arguments of each method, tool calls in streams, and errors that a UI can distinguish."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from fake_artifacts import install, make_artifact
from runtimes import make_runtime

import edgekit
from edgekit.errors import (
    ContextExceeded,
    InvalidOption,
    InvalidPrompt,
    RuntimeClosed,
    TemplateRefused,
    UnknownName,
)
from edgekit.runtime.generation.chat_template import ChatTemplate
from edgekit.runtime.generation.tool_calls import ToolCallReader, parse_tool_calls
from edgekit.runtime.runtime import Runtime

MESSAGES = [{"role": "user", "content": "the cat"}]
CALL = '{"name": "find", "arguments": {"place": "mat"}}'
HERMES = f"a <tool_call>{CALL}</tool_call> b"
PHI = f"a <|tool_call|>[{CALL}]<|/tool_call|> b"


def test_chat_refuses_a_text_and_generate_refuses_messages() -> None:
    with make_runtime() as runtime:
        for wrong in ("the cat", b"the cat", [1, 2, 3]):
            with pytest.raises(InvalidPrompt, match=r"chat takes a list of messages.*use generate"):
                runtime.chat(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidPrompt, match=r"generate takes a text; use chat\(messages\)"):
            runtime.generate(MESSAGES)  # type: ignore[arg-type]
        with pytest.raises(InvalidPrompt, match=r"generate takes a text; use complete\(tokens\)"):
            runtime.generate([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda runtime: runtime.generate("x", temprature=1), InvalidOption),
        (lambda runtime: runtime.generate("x", top_p=2), InvalidOption),
        (lambda runtime: runtime.complete([]), InvalidPrompt),
        (lambda runtime: runtime.chat([{"content": "no role"}]), InvalidPrompt),
        (lambda runtime: runtime.chat([{"role": "usr", "content": "x"}]), InvalidPrompt),
        (lambda runtime: runtime.chat([{"role": "user", "content": [{"type": "image_url"}]}]), InvalidPrompt),
        (lambda runtime: runtime.chat([{"role": "user", "content": [{"type": "text"}]}]), InvalidPrompt),
        (lambda runtime: runtime.generate("the " * 2000), ContextExceeded),
        (lambda runtime: runtime.generate("x", adapter="none"), UnknownName),
    ],
)
def test_each_kind_of_refusal_has_its_class(ask: Callable[[Runtime], object], error: type[Exception]) -> None:
    with make_runtime() as runtime, pytest.raises(error) as caught:
        ask(runtime)
    assert caught.type is error


def test_template_refusals_and_closed_runtimes_have_their_own_error_classes() -> None:
    with make_runtime() as runtime:
        runtime.template = ChatTemplate({"default": "{{ raise_exception('roles must alternate') }}"}, {})
        with pytest.raises(TemplateRefused, match="roles must alternate"):
            runtime.chat(MESSAGES)
    with pytest.raises(RuntimeClosed):
        runtime.generate("x")


def test_stop_takes_one_string() -> None:
    with make_runtime() as runtime:
        text = runtime.generate("the", max_tokens=40).text
        stop = text[5:8]
        assert runtime.generate("the", max_tokens=40, stop=stop).text == text[: text.index(stop)]


def test_an_answer_prints_as_its_text() -> None:
    with make_runtime() as runtime:
        answer = runtime.generate("the", max_tokens=40)
    assert str(answer) == answer.text
    assert len(repr(answer)) < len(repr(answer.text)) + 80


def test_streams_give_each_tool_call_when_its_end_marker_is_there() -> None:
    text = f"{HERMES}<tool_call>{CALL}</tool_call>"
    reader, ends = ToolCallReader({"find"}), []
    for place, letter in enumerate(text):
        ends += [place for _ in reader.push(letter)]
    assert ends == [text.index("</tool_call>") + 11, len(text) - 1]
    assert reader.finish() == () and reader.content == "a  b"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    [
        HERMES,
        f"x<tool_call>{CALL}</tool_call><tool_call>{CALL}",
        f"<|tool_call|>[{CALL}]<|/tool_call|> y",
        f"[TOOL_CALLS][{CALL}, {CALL}]",
        CALL,
        f"```json\n{CALL}\n```",
        "<tool_call>{broken</tool_call> text",
        "no call",
    ],
)
def test_calls_of_a_stream_are_those_of_the_whole_text(text: str, size: int) -> None:
    reader = ToolCallReader({"find"})
    calls = [call for start in range(0, len(text), size) for call in reader.push(text[start : start + size])]
    calls += reader.finish()
    assert (reader.content, tuple(calls)) == parse_tool_calls(text, {"find"})
    assert len({call.id for call in calls}) == len(calls)
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)


def test_a_stream_with_tools_ends_with_its_calls() -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    with make_runtime() as runtime:
        # The fake engine writes no calls: a grammar of one text makes it write one.
        pytest.importorskip("llguidance")
        options: dict[str, Any] = {"tools": tools, "grammar": f"start: {json.dumps(PHI)}", "seed": 1}
        pieces = list(runtime.stream(MESSAGES, **options))
        answer = runtime.chat(MESSAGES, **options)
    calls = [call for piece in pieces for call in piece.tool_calls]
    assert [(call.name, call.arguments) for call in calls] == [("find", {"place": "mat"})]
    assert "".join(piece.text for piece in pieces) == PHI
    assert pieces[-1].finish_reason == answer.finish_reason == "tool_calls"
    assert tuple(calls) == answer.tool_calls
    message = json.loads(json.dumps(answer.message()))
    assert message["content"] == "a  b" and message["tool_calls"][0]["id"] == calls[0].id
    assert message["tool_calls"][0]["function"] == {"name": "find", "arguments": {"place": "mat"}}


def test_calls_are_read_where_the_template_takes_no_tools() -> None:
    pytest.importorskip("llguidance")
    with make_runtime() as runtime:
        runtime.template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
        answer = runtime.chat(MESSAGES, tools=[{"name": "find"}], grammar=f"start: {json.dumps(PHI)}")
        assert answer.tool_calls[0].arguments == {"place": "mat"}
    assert edgekit.parse_tool_calls(HERMES, ["find"]).calls[0].arguments == {"place": "mat"}


def test_the_text_parts_of_a_message_are_one_text() -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    with make_runtime() as runtime:
        answers = [runtime.chat([{"role": "user", "content": content}], max_tokens=4) for content in ("the cat", parts)]
    assert answers[0].tokens == answers[1].tokens


def test_async_submit_refuses_before_the_first_piece() -> None:
    async def main() -> None:
        async with edgekit.AsyncRuntime(make_runtime()) as runtime:
            for wrong, error in (({"top_p": 2}, InvalidOption), ({"adapter": "none"}, UnknownName)):
                with pytest.raises(error):
                    await runtime.submit("the cat", **wrong)  # type: ignore[arg-type]
            with pytest.raises(InvalidPrompt):
                await runtime.chat("the cat")  # type: ignore[arg-type]
            with pytest.raises(InvalidPrompt):
                await runtime.generate(MESSAGES)  # type: ignore[arg-type]
            assert runtime.metrics().requests == 0

    asyncio.run(main())


def test_an_async_handle_has_a_seed_an_answer_and_can_be_cancelled() -> None:
    async def main() -> None:
        async with edgekit.AsyncRuntime(make_runtime(window=64)) as runtime:
            one = await runtime.submit("the", max_tokens=12, temperature=1.0)
            again = await runtime.submit("the", max_tokens=12, temperature=1.0, seed=one.seed)
            assert (await one.answer()).text == (await again.answer()).text
            endless = await runtime.submit("the", max_tokens=1_000_000)
            pieces = []
            async for piece in endless:
                pieces.append(piece)
                endless.cancel()
            assert pieces[-1].finish_reason == "cancelled"
            dropped = await runtime.submit("the", max_tokens=1_000_000)
            await dropped.close()
            async with asyncio.timeout(30):
                while runtime.metrics().running:
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def test_an_artifact_opens_beside_the_event_loop(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "artifact")

    async def main() -> int:
        options = edgekit.OpenOptions(sequences=2)
        ticks, opening = 0, asyncio.ensure_future(edgekit.AsyncRuntime.open(tmp_path / "artifact", options))
        while not opening.done():
            ticks += 1
            await asyncio.sleep(0)
        async with await opening as runtime:
            assert (await runtime.generate("def", max_tokens=3)).tokens
            assert runtime.runtime.sequences == 2
        return ticks

    assert asyncio.run(main()) > 10


def test_a_cancelled_opening_closes_what_it_opened(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "artifact")
    closed: list[Runtime] = []
    close = Runtime.close
    monkeypatch.setattr(Runtime, "close", lambda runtime: (closed.append(runtime), close(runtime))[1])

    async def main() -> None:
        opening = asyncio.ensure_future(edgekit.AsyncRuntime.open(tmp_path / "artifact"))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        async with asyncio.timeout(30):
            while not closed:
                await asyncio.sleep(0.01)

    asyncio.run(main())
