"""Every field of every body is read, refused by name, or listed as ignored."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hostile_requests import BODIES, Described
from pydantic import ValidationError
from serving import Served

import edgekit.apps.serve
from edgekit.apps.serve.fields import ApiFields, OwnFields, WithoutEffect
from edgekit.apps.serve.messages import AnthropicMessage
from edgekit.apps.serve.problems import ApiError

FOLDER = Path(edgekit.apps.serve.__file__).parent


def bodies() -> Iterator[type[ApiFields]]:
    for module in pkgutil.iter_modules([str(FOLDER)]):
        importlib.import_module(f"edgekit.apps.serve.{module.name}")
    waiting = [ApiFields]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += found.__subclasses__()


def read_names() -> set[str]:
    """The attributes that the server's code reads, and the names in its tables of fields."""
    found: set[str] = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Tuple | ast.List | ast.Set):
                found |= {
                    each.value for each in node.elts if isinstance(each, ast.Constant) and isinstance(each.value, str)
                }
    return found


def test_every_field_is_read_or_without_effect() -> None:
    read, without = read_names(), WithoutEffect.__metadata__
    unread = {
        f"{body.__name__}.{name}"
        for body in bodies()
        for name, field in body.model_fields.items()
        if not issubclass(body, OwnFields)  # which are options as they are
        if name not in read and not set(without) & set(field.metadata)
    }
    # Kinds are checked by their types; a description of a form is for people; a refusal has no text to read.
    by_type = {"MessageCall.type", "ChatBody.modalities"}
    assert unread <= {"JsonSchema.description", "ChatMessage.refusal", "JsonSchema.name"} | by_type


def post(served: Served, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{served.url}{path}", content=content, headers={"content-type": "application/json", **headers})


def test_fields_without_effect_are_listed_with_those_of_parts(served: Served) -> None:
    block = {"type": "text", "text": "the cat", "cache_control": {"type": "ephemeral"}}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [block, block]}], "metadata": {"user_id": "a"}}
    answer = post(served, "/v1/messages", body)
    assert answer.status_code == 200
    assert answer.headers["x-edgekit-ignored"].split(",") == ["metadata", "messages.content.cache_control"]
    body = {
        "input": "the cat",
        "max_output_tokens": 1,
        "truncation": "auto",
        "include": ["reasoning.encrypted_content"],
    }
    answer = post(served, "/v1/responses", body)
    assert answer.json()["truncation"] == "disabled"
    ignored = answer.headers["x-edgekit-ignored"].split(",")
    assert ignored == ["truncation", "include.reasoning.encrypted_content"]


def test_a_failed_tool_says_so_to_the_model() -> None:
    def told(text: str, is_error: bool | None) -> str:
        block = {"type": "tool_result", "tool_use_id": "a", "content": text, "is_error": is_error}
        message = AnthropicMessage.model_validate({"role": "user", "content": [block]})
        content: str = message.plain("messages.0")[0]["content"]
        return content

    assert told("no such file", True) == "Error: no such file"
    assert told("Error: no such file", True) == "Error: no such file"
    assert told("no such file", None) == told("no such file", False) == "no such file"


def test_what_clients_send_and_mean_nothing_by_is_taken(served: Served) -> None:
    options = {"top_k": 0, "num_predict": 2.0, "seed": 3.0, "temperature": 1}
    body = {"model": "tiny", "prompt": "the cat", "stream": False, "options": options}
    assert post(served, "/api/generate", body).json()["eval_count"] == 2
    answer = httpx.post(f"{served.url}/api/generate", content=json.dumps(body))  # without a Content-Type
    assert answer.status_code == 200
    assert httpx.post(f"{served.url}/v1/completions", content=json.dumps({"prompt": "a"})).status_code == 415


REFUSED: dict[str, tuple[str, Any]] = {
    "a huge temperature": ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"temperature": 10**400}}),
    "a huge keep_alive": ("/api/generate", {"model": "tiny", "prompt": "a", "keep_alive": 10**400}),
    "NaN": ("/v1/responses", b'{"input": "a", "metadata": {"a": NaN}}'),
    "Infinity": ("/v1/responses", b'{"input": "a", "tool_choice": {"type": "function", "name": "f", "x": -Infinity}}'),
    "a number that overflows": ("/v1/responses", b'{"input": "a", "metadata": {"a": 1e999}}'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_odd_values_are_the_clients_mistake(served: Served, name: str) -> None:
    path, body = REFUSED[name]
    answer = post(served, path, body)
    assert answer.status_code == 400, answer.text


def test_an_unknown_field_of_any_name_is_answered(served: Served) -> None:
    for name in (" ", "a ", " a", "a,b", "\u00e4", "a\nb", ""):
        answer = post(served, "/v1/completions", {"prompt": "a", "max_tokens": 1, name: 1, "zebra": 1})
        assert answer.headers["x-edgekit-ignored"] == "zebra"


@pytest.mark.parametrize("path", BODIES)
def test_what_is_described_is_accepted_and_nothing_else(path: str) -> None:
    wrong = []
    for value, is_allowed in Described().bodies(path):
        try:
            accepted = bool(BODIES[path].model_validate_json(json.dumps(value)))
        except (ValidationError, ApiError):
            accepted = False
        if accepted != is_allowed:
            wrong.append((accepted, value))
    assert not wrong


def test_texts_may_speak_of_nan(served: Served) -> None:
    assert post(served, "/v1/completions", {"prompt": "NaN is not -Infinity", "max_tokens": 1}).status_code == 200
