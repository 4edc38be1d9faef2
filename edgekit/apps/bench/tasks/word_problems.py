"""GSM8K: mathematical word problems; the last number of the answer counts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgekit.apps.bench.tasks.data_sets import GSM8K, records
from edgekit.apps.bench.tasks.task import Judgement, ModelInput, PublicTask, TaskAnswer, chat_of
from edgekit.errors import quote_short

# Worked examples that are not in the data set.
EXAMPLES = (
    (
        "A baker puts 6 rolls into each bag. She fills 7 bags and keeps 5 rolls for herself. How many did she bake?",
        "The bags hold 6 * 7 = 42 rolls. With the 5 that she keeps, she baked 42 + 5 = 47 rolls.\n#### 47",
    ),
    (
        "Omar earns $15 an hour and works 8 hours on Monday and half as long on Tuesday. How much does he earn?",
        "On Tuesday he works 8 / 2 = 4 hours. That is 8 + 4 = 12 hours, so he earns 12 * 15 = 180 dollars.\n#### 180",
    ),
    (
        "A tank holds 200 litres. It is filled to 40%. Then 30 litres are used. How many litres are left?",
        "40% of 200 is 200 * 0.4 = 80 litres. After 30 are used, 80 - 30 = 50 litres are left.\n#### 50",
    ),
    (
        "Three friends share a bill of $84 equally. Ina also pays a tip of $6. How many dollars does Ina pay?",
        "Each share is 84 / 3 = 28 dollars. With the tip Ina pays 28 + 6 = 34 dollars.\n#### 34",
    ),
)
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+")


class Gsm8k(PublicTask):
    """A word problem after four worked examples."""

    name, title, data = "gsm8k", "sums in words, last number", (GSM8K,)
    version = 1
    runs_code = needs_chat = False

    def items(self) -> dict[str, dict[str, Any]]:
        return {str(item["id"]): item for item in records(GSM8K)}

    def ask(self, item: Mapping[str, Any], *, chat: bool, tools: bool) -> ModelInput:
        if chat:
            turns = [text for example in EXAMPLES for text in example]
            return ModelInput(chat_of([*turns, item["prompt"]]), max_tokens=256)
        shown = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in EXAMPLES)
        return ModelInput(f"{shown}Question: {item['prompt']}\nAnswer:", max_tokens=256, stop=("\nQuestion:",))

    def judge(self, item: Mapping[str, Any], answer: TaskAnswer) -> Judgement:
        said = last_number(answer.text)
        right = said is not None and said == last_number(str(item["expected"]))
        return Judgement(right, "" if right else f"said {quote_short(answer.text.strip()[-60:])}")


def last_number(text: str) -> float | None:
    """Return the number after `####`, else the last number of the text."""
    marked = text.partition("####")[2]
    numbers = _NUMBER.findall(marked)[:1] or _NUMBER.findall(text)[-1:]
    return float(numbers[0].replace(",", "").replace("$", "")) if numbers else None
