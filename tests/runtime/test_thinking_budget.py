"""A budget of tokens for thinking: its end is written when it is spent, and a format follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from runtimes import codec, make_runtime

from edgekit.errors import InvalidOption
from edgekit.runtime.generation.chat_template import ChatTemplate
from edgekit.runtime.generation.reasoning import ReasoningReader
from edgekit.runtime.generation.thinking import ThinkingBudget
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.speculation.drafters import Drafting
from edgekit.testing import FakeEngine, ReplayDrafter

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


CHAT = [{"role": "user", "content": "the cat"}]


@pytest.mark.parametrize("drafts", [False, True])
def test_an_answer_keeps_its_budget(drafts: bool) -> None:
    with thinking_runtime() as runtime:
        free = runtime.chat(CHAT, max_tokens=40, seed=1)
    drafting = Drafting(lambda prompt: ReplayDrafter([*prompt, *free.tokens]), 4) if drafts else None
    with thinking_runtime(drafting=drafting) as runtime:
        chat = CHAT
        assert (free.reasoning, free.content) == split(free.text)
        kept = runtime.chat(chat, max_tokens=40, seed=1, thinking_tokens=5)
        end = tokens_of("\n</think>\n\n")
        assert list(kept.tokens[:5]) == list(free.tokens[:5])
        assert list(kept.tokens[5 : 5 + len(end)]) == end
        assert len(kept.tokens) == 40
        assert kept.reasoning == runtime.decode(free.tokens[:5]).strip("\n")
        assert kept.content
        assert runtime.chat(chat, max_tokens=40, seed=1, thinking_tokens=1000).text == free.text


def test_parsed_answers_begin_after_the_thinking() -> None:
    pytest.importorskip("llguidance")
    with thinking_runtime() as runtime:
        chat, schema = CHAT, {"type": "object", "properties": {}}
        closed = {**schema, "additionalProperties": False}
        for budget in (3, 0):
            answer = runtime.chat(chat, max_tokens=200, thinking_tokens=budget, schema=closed)
            assert answer.parsed == {}
            assert bool(answer.reasoning) == (budget > 0)
        with pytest.raises(InvalidOption, match="thinking_tokens"):
            runtime.chat(chat, thinking_tokens=-1)
