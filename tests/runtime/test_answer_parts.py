"""The parts of an answer: what stopped it, reasoning, content around tool calls, several answers, empty ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtimes import make_runtime

from edgekit.errors import InvalidOption
from edgekit.runtime.generation.reasoning import ReasoningReader
from edgekit.runtime.generation.tool_calls import ToolCallReader, parse_tool_calls


def test_answer_has_the_stop_string_or_token_that_ended_it() -> None:
    with make_runtime() as runtime:
        whole = runtime.generate("the cat", max_tokens=30, temperature=1.0, seed=3)
        middle = whole.text[len(whole.text) // 2 :][:3]
        stopped = runtime.generate("the cat", max_tokens=30, temperature=1.0, seed=3, stop=["never there", middle])
        assert stopped.stop == middle
        assert stopped.text == whole.text[: whole.text.index(middle)]
        token = whole.tokens[5]
        by_token = runtime.generate("the cat", max_tokens=30, temperature=1.0, seed=3, stop_tokens=[token])
        assert by_token.stop == token
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


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWERS = (
    f"Sure. \n{CALL}",
    f"{CALL}\n{CALL} and done",
    f"One {CALL} two {CALL} three",
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
    whole, reader = parse_tool_calls(text, {"f"}), ToolCallReader({"f"})
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    calls, content = [], ""
    for a, b in pairwise(places):
        calls += reader.push(text[a:b])
        content += reader.take_content()
    calls += reader.finish()
    content += reader.rest
    assert [(call.name, call.arguments) for call in calls] == [(call.name, call.arguments) for call in whole.calls]
    assert (content.strip() if whole.calls else content) == whole.content == reader.content


def test_text_before_a_call_is_released_at_once_and_its_marks_never() -> None:
    reader = ToolCallReader({"f"})
    reader.push("I look it up <tool")
    assert reader.take_content() == "I look it up"
    reader.push('_call>{"name": "f", "arg')
    assert reader.take_content() == ""
