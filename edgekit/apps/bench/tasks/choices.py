"""Multiple-choice tasks: the model chooses the continuation with the highest likelihood."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgekit.apps.bench.tasks.data_sets import HELLASWAG, TRUTHFUL_QA, records
from edgekit.apps.bench.tasks.task import Judgement, ModelInput, PublicTask, TaskAnswer
from edgekit.errors import quote_short


class _ChoiceTask(PublicTask):
    """A task with one right continuation among several."""

    version = 1
    runs_code = needs_chat = False


class HellaSwag(_ChoiceTask):
    """One of four endings of a description. Scores are per byte, so that length does not decide."""

    name, title, data = "hellaswag", "endings, by likelihood a byte", (HELLASWAG,)

    def items(self) -> dict[str, dict[str, Any]]:
        return {str(item["id"]): item for item in records(HELLASWAG)}

    def ask(self, item: Mapping[str, Any], *, chat: bool, tools: bool) -> ModelInput:
        # Chat models continue the text too, because it asks no question.
        prompt = f"{item['activity_label']}: {_plain(item['ctx'])}"
        return ModelInput(prompt, tuple(f" {_plain(ending)}" for ending in item["endings"]))

    def judge(self, item: Mapping[str, Any], answer: TaskAnswer) -> Judgement:
        sizes = [len(_plain(ending).encode()) for ending in item["endings"]]
        return _judged(item["endings"], [total / size for total, size in zip(answer.totals, sizes, strict=True)], item)


class TruthfulQa(_ChoiceTask):
    """One true answer among false ones, to a question that people often answer wrongly (MC1)."""

    name, title, data = "truthfulqa", "true answers (MC1), by likelihood", (TRUTHFUL_QA,)

    def items(self) -> dict[str, dict[str, Any]]:
        return {str(item["id"]): item for item in records(TRUTHFUL_QA)}

    def ask(self, item: Mapping[str, Any], *, chat: bool, tools: bool) -> ModelInput:
        if chat:
            return ModelInput([{"role": "user", "content": item["question"]}], tuple(item["choices"]))
        return ModelInput(f"Q: {item['question']}\nA:", tuple(f" {choice}" for choice in item["choices"]))

    def judge(self, item: Mapping[str, Any], answer: TaskAnswer) -> Judgement:
        return _judged(item["choices"], list(answer.totals), item)


def _judged(choices: list[str], values: list[float], item: Mapping[str, Any]) -> Judgement:
    chosen = max(range(len(values)), key=values.__getitem__)
    right = chosen == item["expected_index"]
    return Judgement(right, "" if right else f"chose {quote_short(choices[chosen])}")


def _plain(text: str) -> str:
    """Remove the markup of video captions."""
    return re.sub(r" +", " ", re.sub(r"\[.*?\]", "", text.replace(" [title]", ". "))).strip()
