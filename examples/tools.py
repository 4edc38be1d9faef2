"""Let a model call Python functions. edgekit never runs anything by itself: the loop below does.

    python -m examples.tools my.edgekit "What is 17 times 23?"

Models that were trained on tools take them in their chat template. For all others, the same loop works with a schema
that only lets the model write a valid call, or an answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import edgekit
from edgekit.errors import Unsupported

MAX_ROUNDS = 4

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": -9999, "maximum": 9999},
                    "b": {"type": "integer", "minimum": -9999, "maximum": 9999},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
]
FUNCTIONS: dict[str, Callable[..., Any]] = {"multiply": lambda a, b: a * b}


def ask(runtime: edgekit.Runtime, question: str) -> str:
    """Answer `question`; call tools until the model answers in words, at most `MAX_ROUNDS` times."""
    messages: list[dict[str, str]] = [{"role": "user", "content": question}]
    for _ in range(MAX_ROUNDS):
        text, calls = next_turn(runtime, messages)
        if not calls:
            return text
        messages.append({"role": "assistant", "content": text})
        for name, arguments in calls:
            result = FUNCTIONS[name](**arguments)
            print(f"{name}({arguments}) = {result}")
            messages.append({"role": "user", "content": f"The result of {name} is {result}."})
    return "no answer after the last allowed call"


def next_turn(runtime: edgekit.Runtime, messages: list[dict[str, str]]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Return the text of the next turn, and the calls in it."""
    try:
        answer = runtime.chat(messages, tools=TOOLS, max_tokens=200)
    except Unsupported:  # the chat template has no place for tools
        return constrained_turn(runtime, messages)
    return answer.text, [(call.name, call.arguments) for call in answer.tool_calls]


def constrained_turn(
    runtime: edgekit.Runtime, messages: list[dict[str, str]]
) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Answer with a model whose template has no tools: every answer is JSON of one of two forms."""
    functions = [tool["function"] for tool in TOOLS]
    described = "\n".join(json.dumps(each) for each in functions)
    system = {"role": "system", "content": f'Answer with {{"answer": ...}}, or call a function:\n{described}'}
    forms: list[dict[str, Any]] = [
        closed_object({"name": {"const": each["name"]}, "arguments": each["parameters"]}) for each in functions
    ]
    forms.append(closed_object({"answer": {"type": "string", "maxLength": 200}}))
    answer = runtime.chat([system, *messages], schema={"anyOf": forms}, max_tokens=250)
    turn = json.loads(answer.text)
    if "answer" in turn:
        return turn["answer"], []
    return answer.text, [(turn["name"], turn["arguments"])]


def closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


if __name__ == "__main__":
    with edgekit.open(sys.argv[1]) as opened:
        print(ask(opened, sys.argv[2]))
