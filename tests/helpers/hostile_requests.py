"""Hostile requests against a server of the fake engine: `python tests/helpers/hostile_requests.py --count 20000`.

Each is made from a seed: bodies with values of wrong kinds, damaged JSON, strange headers and methods. No answer may
have a status of 500 or more but 501 and 503, and every refusal must have the form of its API.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}],
        "max_tokens": 2, "temperature": 0.5, "seed": 1, "stop": ["x"], "n": 1, "logprobs": True, "top_logprobs": 1,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto", "logit_bias": {"5": 1}, "stream": False, "response_format": {"type": "text"},
        "chat_template_kwargs": {"a": 1}, "edgekit": {"top_k": 3},
    },
    "/v1/completions": {"prompt": ["a", [5, 6]], "max_tokens": 1, "logprobs": 1, "echo": True, "n": 1, "stream": False},
    "/v1/responses": {
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "max_output_tokens": 2, "tools": [{"type": "function", "name": "f"}], "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"}, "stream": True,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 2,
        "system": [{"type": "text", "text": "s"}], "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 5}, "stream": True,
    },
    "/v1/rerank": {"query": "a", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": True},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a", "add_special_tokens": False},
    "/detokenize": {"tokens": [1, 2]},
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 2}},
    "/api/generate": {"model": "tiny", "prompt": "a", "options": {"num_predict": 2, "stop": ["x"]}, "format": "json"},
    "/api/show": {"model": "tiny"},
}  # fmt: skip
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**70, 1.0, 0.5, -0.0, 1e308, "", "x", "\0", "\u202e",
    "a" * 3000, "1", [], [None], [[]], [[[]]], {}, {"": ""}, {"type": "object"}, {"$ref": "#"}, {"type": "x" * 300},
    "../../etc/passwd", "http://127.0.0.1:1/", "{{ 7 * 7 }}", [0] * 300, ["x"] * 300,
    {"a": {"b": {"c": [1, {"d": 2}]}}},
]  # fmt: skip
ALLOWED = frozenset({501, 503})


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place of a body: its container and its key."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found.append((value, key))
        places(value[key], found)
    return found


def hostile(number: int) -> dict[str, Any]:
    """The arguments of one request."""
    draw = random.Random(number)
    path = draw.choice([*BODIES, *BODIES, "/v1/models", "/v1/models/a/b:c", "/metrics", "/nothing", "/v1/embeddings"])
    body = copy.deepcopy(BODIES.get(path, {}))
    for _ in range(draw.randint(1, 3)):
        container, key = draw.choice(places(body, [(body, "extra")]))
        if draw.random() < 0.2 and isinstance(container, dict):
            container.pop(key, None)
        else:
            container[key] = copy.deepcopy(draw.choice(STRANGE))
    data = json.dumps(body).encode()
    damage = draw.random()
    if damage < 0.1:
        data = data[: draw.randrange(len(data) + 1)]
    elif damage < 0.15:
        place = draw.randrange(len(data) + 1)
        data = data[:place] + draw.choice([b"NaN", b"\xff", b"\\ud800", b"[" * 500, b"\0", b'"']) + data[place:]
    headers = {"content-type": "application/json"}
    if draw.random() < 0.1:
        odd = {
            "content-type": "text/plain",
            "host": "evil.com",
            "origin": "null",
            "x-request-id": "a b",
            "x-api-key": "k",
        }
        name = draw.choice(list(odd))
        headers[name] = odd[name]
    method = "POST" if draw.random() < 0.95 else draw.choice(["GET", "PUT", "DELETE", "TRACE", "OPTIONS", "HEAD"])
    return {"method": method, "path": path, "content": data, "headers": headers}


def complaint(path: str, method: str, answer: httpx.Response) -> str | None:
    """Return the fault of an answer; None if it has none."""
    if answer.status_code >= 500 and answer.status_code not in ALLOWED:
        return f"status {answer.status_code}: {answer.text[:300]}"
    if "Traceback" in answer.text or "the server failed" in answer.text:
        return f"a failure: {answer.text[-300:]}"
    if answer.status_code < 400 or method == "HEAD":
        return None
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        return f"no error of the API: {answer.text[:200]}"
    is_text = path.startswith("/api/")
    return None if isinstance(error, str if is_text else dict) else f"an error of another API: {answer.text[:200]}"


def attack(url: str, numbers: range) -> tuple[Counter[int], list[str]]:
    """Send the requests of these numbers; return the statuses and the complaints."""
    statuses, complaints = Counter[int](), []
    with httpx.Client(base_url=url, timeout=60) as client:
        for number in numbers:
            request = hostile(number)
            path = request.pop("path")
            answer = client.request(request.pop("method"), path, **request)
            statuses[answer.status_code] += 1
            if reason := complaint(path, answer.request.method, answer):
                complaints.append(f"request {number} to {path}: {reason}")
    return statuses, complaints


def main() -> None:
    """Run from the command line."""
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    from serving import serving

    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    with serving(ollama=True) as served:
        statuses, complaints = attack(served.url, range(given.first, given.first + given.count))
        left = served.service.admission.active
    print(dict(statuses), f"{left} answers left", *complaints[:20], sep="\n")  # noqa: T201
    sys.exit(bool(complaints or left))


if __name__ == "__main__":
    main()
