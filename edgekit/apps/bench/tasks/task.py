"""The interface of a public task: questions for a model, and a judge of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from edgekit.apps.bench.wheel_data import WheelData


class ModelInput(NamedTuple):
    """One question for a model: continuations to score, or a prompt to answer."""

    prompt: str | list[dict[str, Any]]  # a text, or messages for the chat template
    continuations: tuple[str, ...] = ()
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()  # only where the model's template takes them


class TaskAnswer(NamedTuple):
    """A model's answer: a log-probability for each continuation, or a text."""

    totals: tuple[float, ...] = ()
    text: str = ""


class Judgement(NamedTuple):
    """Right or wrong; `why` is empty if it is right."""

    right: bool
    why: str


class PublicTask(Protocol):
    """A data set with its prompts and its judge. Items are the objects of the data set."""

    name: str
    title: str  # description of the counted items
    version: int  # to be raised when prompts change, so that stored answers of two versions are not mixed
    data: tuple[WheelData, ...]
    runs_code: bool
    needs_chat: bool

    def items(self) -> Mapping[str, dict[str, Any]]:
        """Return every item by its id, in the order of the data set."""

    def group(self, item: Mapping[str, Any]) -> str:
        """Return the name of the item's part of the data set; empty if the data set has no parts."""
        return ""

    def ask(self, item: Mapping[str, Any], *, chat: bool, tools: bool) -> ModelInput:
        """Build the question. `chat`: the model has a chat template. `tools`: the template accepts tools."""

    def judge(self, item: Mapping[str, Any], answer: TaskAnswer) -> Judgement: ...


def chat_of(turns: Sequence[str]) -> list[dict[str, Any]]:
    """Return messages of user and assistant in turn, the user first."""
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
