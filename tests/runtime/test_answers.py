"""Answers of the Python API: texts, parts, calls, ends, and budgets of thinking."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fake_artifacts import install, make_artifact
from hypothesis import given, settings, strategies as st
from runtimes import codec, make_runtime

import edgekit
from edgekit.errors import ContextExceeded, InvalidOption, InvalidPrompt, RuntimeClosed, TemplateRefused, UnknownName
from edgekit.runtime.generation.chat_template import ChatTemplate
from edgekit.runtime.generation.reasoning import ReasoningReader
from edgekit.runtime.generation.stopping import StopStrings
from edgekit.runtime.generation.thinking import ThinkingBudget
from edgekit.runtime.generation.tool_calls import ToolCallReader, parse_tool_calls
from edgekit.runtime.runtime import Runtime
from edgekit.testing import FakeEngine, ReplayDrafter
from edgekit.testing.drafting import Drafting

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


def test_streams_give_each_tool_call_when_its_end_marker_is_there() -> None:
    text = f"{HERMES}<tool_call>{CALL}</tool_call>"
    reader, ends = ToolCallReader({"find"}), []
    for place, letter in enumerate(text):
        ends += [place for _ in reader.push(letter)]
    assert ends == [text.index("</tool_call>") + 11, len(text) - 1]
    assert reader.finish() == () and reader.content == "a  b"


def test_a_stream_with_tools_ends_with_its_calls() -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    with make_runtime() as runtime:
        # The fake engine writes no calls: a grammar of one text makes it write one.
        pytest.importorskip("llguidance")
        options: dict[str, Any] = {"tools": tools, "grammar": f"start: {json.dumps(PHI)}", "seed": 1}
        pieces = list(runtime.stream(MESSAGES, **options))
        answer = runtime.chat(MESSAGES, **options)
        assert runtime.chat(MESSAGES, grammar=options["grammar"]).tool_calls == ()  # nothing was offered
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


def test_answer_has_the_stop_string_that_ended_it() -> None:
    with make_runtime() as runtime:
        whole = runtime.generate("the cat", max_tokens=30, temperature=1.0, seed=3)
        middle = whole.text[len(whole.text) // 2 :][:3]
        stopped = runtime.generate("the cat", max_tokens=30, temperature=1.0, seed=3, stop=["never there", middle])
        assert stopped.stop == middle
        assert runtime.generate("the cat", max_tokens=30, temperature=1.0, seed=3, stop=middle).text == stopped.text
        assert stopped.text == whole.text[: whole.text.index(middle)]
        assert whole.stop is None


def test_zero_tokens_only_process_and_cache_the_prompt() -> None:
    with make_runtime(prefix_bytes=1 << 20) as runtime:
        answer = runtime.generate("the cat sat on the mat", max_tokens=0)
        assert (answer.text, answer.tokens, answer.finish_reason) == ("", (), "length")
        assert runtime.generate("the cat sat on the mat", max_tokens=1).timings.cached_tokens > 0


def test_several_answers_have_the_seed_and_the_next_ones() -> None:
    with make_runtime() as runtime:
        streams = runtime.submit_several("the cat", 3, max_tokens=12, temperature=1.0, seed=7)
        texts = [stream.answer().text for stream in streams]
        assert texts == [
            runtime.generate("the cat", max_tokens=12, temperature=1.0, seed=7 + place).text for place in range(3)
        ]
        assert len(set(texts)) > 1


def test_prompt_logprobs_report_the_likeliest_tokens() -> None:
    with make_runtime() as runtime:
        score = runtime.prompt_logprobs("the cat sat on the mat", top=3)
        assert [len(top) for top in score.top] == [3] * len(score.logprobs)
        assert score.logprobs == runtime.prompt_logprobs("the cat sat on the mat").logprobs
        for token, logprob, top in zip(score.tokens, score.logprobs, score.top, strict=True):
            assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
            assert dict(top).get(token, logprob) == logprob <= top[0][1]
        with pytest.raises(InvalidOption, match="0 to 20"):
            runtime.prompt_logprobs("the cat", top=21)


REASONED = (
    ("<think>\nhm, 2 < 3\n</think>\n\nfour", False, "hm, 2 < 3", "four"),
    ("  <think>a</think>b</think>", False, "a", "b</think>"),
    ("hm</think>four", True, "hm", "four"),
    ("cut sho", True, "cut sho", ""),
    ("<thin", False, "", "<thin"),
    ("plain <think>x</think>", False, "", "plain <think>x</think>"),
)


@pytest.mark.parametrize(("text", "is_inside", "reasoning", "content"), REASONED)
@given(cuts=st.lists(st.integers(0, 40), max_size=8))
@settings(max_examples=40, deadline=None)
def test_reasoning_is_split_off_however_the_text_is_cut(
    text: str, is_inside: bool, reasoning: str, content: str, cuts: list[int]
) -> None:
    reader = ReasoningReader(is_inside=is_inside)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [reader.push(text[a:b]) for a, b in pairwise(places)] + [reader.finish()]
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.content for part in parts) == content


ANSWERS = (
    f"Sure. \n{CALL}",
    f"{CALL}\n{CALL} and done",
    f"One {CALL} two {CALL} three",
    HERMES,
    f"x<tool_call>{CALL}</tool_call><tool_call>{CALL}",
    f"<|tool_call|>[{CALL}]<|/tool_call|> y",
    f"[TOOL_CALLS][{CALL}, {CALL}]",
    f"```json\n{CALL}\n```",
    "<tool_call>{broken</tool_call> text",
    '{"name": "f", "arguments": {}}',
    "[1] is a list, {a} a set",
    'Look:\n```json\n{"name": "f", "arguments": {}}\n```',
    "Look:\n```python\nprint(1)\n```\nbye",
    '<tool_call>{"name": "unknown"}</tool_call> stays',
    "a < b and <tool and [TOOL",
    '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    "so <|python_tag|>f.call(a=1)",
)


@pytest.mark.parametrize("text", ANSWERS)
@given(cuts=st.lists(st.integers(0, 90), max_size=10))
@settings(max_examples=60, deadline=None)
def test_streamed_content_is_the_text_without_calls(text: str, cuts: list[int]) -> None:
    whole, reader = parse_tool_calls(text, {"f", "find"}), ToolCallReader({"f", "find"})
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    calls, content = [], ""
    for a, b in pairwise(places):
        calls += reader.push(text[a:b])
        content += reader.take_content()
    calls += reader.finish()
    content += reader.rest
    assert tuple(calls) == whole.calls
    assert len({call.id for call in calls}) == len(calls)
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    assert (content.strip() if whole.calls else content) == whole.content == reader.content


def test_text_before_a_call_is_released_at_once_and_its_marks_never() -> None:
    reader = ToolCallReader({"f"})
    reader.push("I look it up <tool")
    assert reader.take_content() == "I look it up"
    reader.push('_call>{"name": "f", "arg')
    assert reader.take_content() == ""


OPENS_THINKING = "{% for message in messages %}{{ message.content }}\n{% endfor %}<think>\n"


def tokens_of(text: str) -> list[int]:
    return codec().encode(text, add_special_tokens=False)


def grown(budget: ThinkingBudget, wanted: str) -> str:
    """The text that comes out where a model wants to write `wanted`, token by token."""
    chosen: list[int] = []
    for token in tokens_of(wanted):
        while (allowed := budget.allowed()) is not None and not allowed[token]:
            chosen.append(int(np.flatnonzero(allowed)[0]))
            budget.advance(chosen[-1])
        chosen.append(token)
        budget.advance(token)
    return codec().decode(chosen, skip_special=False)


def budget_of(most: int | None, **more: Any) -> ThinkingBudget:
    return ThinkingBudget(codec(), codec().vocabulary, most, **more)


@pytest.mark.parametrize(
    ("wanted", "most", "becomes"),
    [
        ("<think>the cat sat</think>a", 100, "<think>the cat sat</think>a"),
        (
            "<think>the cat sat on",
            3,  # a space is a token of its own
            "<think>the cat\n</think>\n\n sat on",
        ),
        ("\n <think>the cat sat", 1, "\n <think>the\n</think>\n\n cat sat"),
        ("<think>the cat", 0, "<think>\n</think>\n\nthe cat"),
        ("the cat <think>sat on", 1, "the cat <think>sat on"),
    ],
)
def test_thinking_ends_where_its_budget_is_spent(wanted: str, most: int, becomes: str) -> None:
    assert grown(budget_of(most), wanted) == becomes


def test_thinking_that_the_prompt_began_counts_from_the_first_token() -> None:
    assert grown(budget_of(1, is_inside=True), "the cat sat") == "the\n</think>\n\n cat sat"
    assert grown(budget_of(0, is_inside=True), "the cat") == "\n</think>\n\nthe cat"


def test_a_fork_advances_on_its_own() -> None:
    budget = budget_of(3, is_inside=True)
    budget.advance(tokens_of("the")[0])
    fork = budget.fork()
    assert grown(fork, " cat sat") == " cat\n</think>\n\n sat"
    assert budget.allowed() is None
    assert grown(budget, " cat sat") == " cat\n</think>\n\n sat"


class OneToken:
    """A grammar that allows one token, once."""

    def __init__(self, token: int) -> None:
        self.token, self.is_done = token, False

    def allowed(self) -> Any:
        mask = np.zeros(codec().vocabulary, bool)
        mask[self.token] = True
        return mask

    def advance(self, token: int) -> None:
        assert token == self.token
        self.is_done = True

    def fork(self) -> OneToken:
        return self

    def is_finished(self) -> bool:
        return self.is_done

    def close(self) -> None:
        """Nothing to release."""


def test_format_applies_after_the_thinking() -> None:
    budget = budget_of(None, inner=OneToken(tokens_of("mat")[0]), is_inside=True)
    assert grown(budget, "the cat</think>") == "the cat</think>"
    assert not budget.is_finished()
    assert grown(budget, "mat") == "mat"
    assert budget.is_finished()


def thinking_runtime(**given: Any) -> Runtime:
    runtime = make_runtime(FakeEngine(vocabulary=codec().vocabulary, max_states=4), **given)
    runtime.template = ChatTemplate({"default": OPENS_THINKING}, {})
    return runtime


def split(text: str) -> tuple[str, str]:
    reader = ReasoningReader(is_inside=True)
    parts: Sequence[Any] = (reader.push(text), reader.finish())
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize("drafts", [False, True])
def test_an_answer_keeps_its_budget(drafts: bool) -> None:
    with thinking_runtime() as runtime:
        free = runtime.chat(MESSAGES, max_tokens=40, seed=1)
    drafting = Drafting(lambda prompt: ReplayDrafter([*prompt, *free.tokens]), 4) if drafts else None
    with thinking_runtime(drafting=drafting) as runtime:
        assert (free.reasoning, free.content) == split(free.text)
        kept = runtime.chat(MESSAGES, max_tokens=40, seed=1, thinking_tokens=5)
        end = tokens_of("\n</think>\n\n")
        assert list(kept.tokens[:5]) == list(free.tokens[:5])
        assert list(kept.tokens[5 : 5 + len(end)]) == end
        assert len(kept.tokens) == 40
        assert kept.reasoning == runtime.decode(free.tokens[:5]).strip("\n")
        assert kept.content
        assert runtime.chat(MESSAGES, max_tokens=40, seed=1, thinking_tokens=1000).text == free.text


def test_parsed_answers_begin_after_the_thinking() -> None:
    pytest.importorskip("llguidance")
    with thinking_runtime() as runtime:
        schema = {"type": "object", "properties": {}}
        closed = {**schema, "additionalProperties": False}
        for budget in (3, 0):
            answer = runtime.chat(MESSAGES, max_tokens=200, thinking_tokens=budget, schema=closed)
            assert answer.parsed == {}
            assert bool(answer.reasoning) == (budget > 0)
        with pytest.raises(InvalidOption, match="thinking_tokens"):
            runtime.chat(MESSAGES, thinking_tokens=-1)


TEXTS = st.text("ab\n", max_size=30)


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def cut(text: str, stops: list[str]) -> str:
    """`text` before the stop string that is complete first; of those, the one that began first."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(deadline=None, max_examples=300)
@given(text=TEXTS, stops=STOPS, sizes=st.lists(st.integers(1, 5), min_size=1))
def test_stop_string_never_leaks_at_any_split(text: str, stops: list[str], sizes: list[int]) -> None:
    watcher, shown, place, stopped = StopStrings(tuple(stops)), "", 0, False
    for turn in range(len(text)):
        piece = text[place : place + sizes[turn % len(sizes)]]
        place += len(piece)
        passed = watcher.push(piece)
        shown += passed.text
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)
        if passed.stop is None:
            held = text[len(shown) : place]
            assert held == "" or any(stop.startswith(held) for stop in stops), "held back without need"
        if passed.stop is not None:
            stopped = True
            break
    assert shown + ("" if stopped else watcher.flush()) == cut(text, stops)


@settings(deadline=None, max_examples=40)
@given(
    stops=st.lists(st.text(st.sampled_from("the cason.🙂"), min_size=1, max_size=3), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_the_answer_is_the_plain_one_cut_at_the_first_stop(stops: list[str], seed: int) -> None:
    with make_runtime() as runtime:
        options = {"max_tokens": 40, "temperature": 1.0, "seed": seed}
        plain = runtime.generate("the cat", **options)
        pieces = list(runtime.stream("the cat", stop=stops, **options))
    shown = "".join(piece.text for piece in pieces)
    assert shown == cut(plain.text, stops)
    assert pieces[-1].finish_reason == ("stop" if cut(plain.text, stops) != plain.text else "length")


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it() -> None:
    with make_runtime() as runtime:
        plain = runtime.generate("the cat", max_tokens=20, temperature=1.0, seed=5)
        last = plain.tokens[10]
        stopped = runtime.generate("the cat", max_tokens=20, temperature=1.0, seed=5, stop_tokens=[last])
        place = plain.tokens.index(last)
    assert stopped.tokens == plain.tokens[:place] and stopped.stop == last
    assert stopped.text == codec().decode(
        [*codec().encode("the cat", add_special_tokens=True), *stopped.tokens]
    ).removeprefix("the cat")
    assert stopped.finish_reason == "stop"


def test_the_models_end_of_text_ends_it_unless_told_to_go_on() -> None:
    with make_runtime() as runtime:
        plain = runtime.generate("the cat", max_tokens=20)
    with make_runtime(eos=frozenset({plain.tokens[4]})) as runtime:
        ended = runtime.generate("the cat", max_tokens=20)
        ignored = runtime.generate("the cat", max_tokens=20, ignore_eos=True)
        both = runtime.generate("the cat", max_tokens=20, ignore_eos=True, stop_tokens=[plain.tokens[2]])
    assert ended.finish_reason == "stop" and ended.tokens == plain.tokens[: plain.tokens.index(plain.tokens[4])]
    assert ignored.tokens == plain.tokens and ignored.finish_reason == "length"
    assert both.tokens == plain.tokens[: plain.tokens.index(plain.tokens[2])]
