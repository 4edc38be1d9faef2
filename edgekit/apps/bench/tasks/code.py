"""HumanEval: a function from its signature and docstring, run against the data set's tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgekit.apps.bench.tasks.code_sandbox import run_tests
from edgekit.apps.bench.tasks.data_sets import HUMAN_EVAL, records
from edgekit.apps.bench.tasks.task import Judgement, ModelInput, PublicTask, TaskAnswer

_REQUEST = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}```"
_ENDS = ("\ndef ", "\nclass ", "\nif ", "\nprint", "\n#", "\n@", "\nassert")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class HumanEval(PublicTask):
    """One greedy answer to each problem: pass@1."""

    name, title, data = "humaneval", "programs that pass their tests (pass@1)", (HUMAN_EVAL,)
    version = 1
    runs_code, needs_chat = True, False

    def items(self) -> dict[str, dict[str, Any]]:
        return {str(item["task_id"]): item for item in records(HUMAN_EVAL)}

    def ask(self, item: Mapping[str, Any], *, chat: bool, tools: bool) -> ModelInput:
        if chat:
            request = _REQUEST.format(prompt=item["prompt"])
            return ModelInput([{"role": "user", "content": request}], max_tokens=512, stop=("\n```\n",))
        return ModelInput(item["prompt"], max_tokens=512, stop=_ENDS)

    def judge(self, item: Mapping[str, Any], answer: TaskAnswer) -> Judgement:
        code = program_of(answer.text, item["prompt"], item["entry_point"])
        verdict = run_tests(code, item["prompt"], item["test"], item["entry_point"])
        return Judgement(verdict.passed, verdict.why)


def program_of(text: str, prompt: str, entry_point: str) -> str:
    """Extract the program from an answer: its code block, or the prompt continued by the text."""
    definition = re.compile(rf"^\s*(?:async\s+)?def\s+{re.escape(entry_point)}\b", re.MULTILINE)
    blocks = [block for block in _BLOCK.findall(text) if definition.search(block)]
    if blocks:
        return f"{prompt}\n\n{blocks[0]}\n"  # the prompt brings imports and helpers
    if "```" not in text and definition.search(text):
        return f"{prompt}\n\n{text}\n"
    return prompt + text
