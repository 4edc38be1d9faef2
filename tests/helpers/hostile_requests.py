"""Hostile requests against a server of the fake engine: `python tests/helpers/hostile_requests.py --count 20000`.

Each is made from a seed: bodies with values of wrong kinds, damaged JSON, strange headers and methods. No answer may
have a status of 500 or more but 501, 503 and 504, and every refusal must have the form of its API.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic.json_schema import models_json_schema

from edgekit.apps.serve import openapi
from edgekit.apps.serve.embeddings import OllamaEmbed
from edgekit.apps.serve.ollama import OllamaChat, OllamaGenerate

BODIES = {**openapi.BODIES, "/api/chat": OllamaChat, "/api/generate": OllamaGenerate, "/api/embed": OllamaEmbed}
STRANGE: list[Any] = [
    None, True, 0, -1, 2**31, 2**70, 2.0, 0.5, 1e308, "", "x", "text", "\0", "\u202e", "a" * 3000, "../../etc/passwd",
    "http://127.0.0.1:1/", "{{ 7 * 7 }}", [], [None], [[[]]], {}, {"": ""}, {"$ref": "#"}, {"type": "x" * 300},
    ["x"] * 300, {"a": {"b": {"c": [1, {"d": 2}]}}},
]  # fmt: skip
ALLOWED = frozenset({501, 503, 504})  # a text in a window may have no end but the server's limit


class Described:
    """The schemas of all bodies, and values for each of their parts."""

    def __init__(self) -> None:
        asked = [(body, "validation") for body in BODIES.values()]
        _, shared = models_json_schema(asked, ref_template="#/$defs/{model}")
        self._shared: dict[str, Any] = shared["$defs"]

    def allows(self, schema: dict[str, Any], value: Any) -> bool:
        jsonschema = pytest.importorskip("jsonschema")
        return bool(jsonschema.Draft202012Validator({**schema, "$defs": self._shared}).is_valid(value))

    def values(self, schema: dict[str, Any]) -> Iterator[Any]:
        """Yield strange values for a part, also at its bounds and over them, and for the parts in it."""
        yield from STRANGE
        yield from ([schema["const"]] if "const" in schema else schema.get("enum", []))
        for bound, over in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1)):
            yield from (schema[bound], schema[bound] + over) if bound in schema else ()
        for inner in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from self.values(inner)
        if "$ref" in schema:
            yield from self.values(self._shared[schema["$ref"].rpartition("/")[2]])
        for value in self.values(schema["items"]) if "items" in schema else ():
            yield [value]
        parts = schema.get("properties", {})
        whole = {name: self.one(name, parts[name]) for name in schema.get("required", ()) if name in parts}
        yield from [whole] if parts else []
        for name, part in parts.items():
            yield from ({**whole, name: value} for value in self.values(part))

    def one(self, name: str, schema: dict[str, Any]) -> Any:
        """Return a value that the schema allows."""
        return "tiny" if name == "model" else next(each for each in self.values(schema) if self.allows(schema, each))

    def bodies(self, path: str) -> list[tuple[Any, bool]]:
        """Return bodies for a path, and whether its schema allows them."""
        schema = {"$ref": f"#/$defs/{BODIES[path].__name__}"}
        different = {json.dumps(each): each for each in self.values(schema)}
        return [(each, self.allows(schema, each)) for each in different.values()]


def hostile(number: int, bodies: dict[str, list[Any]]) -> dict[str, Any]:
    """The arguments of one request."""
    draw = random.Random(number)
    path = draw.choice([*BODIES, *BODIES, "/v1/models", "/v1/models/a/b:c", "/metrics", "/nothing", "/v1/embeddings"])
    body = draw.choice(bodies.get(path, [{}]))
    if isinstance(body, dict):
        body = {"max_tokens": 2, "max_output_tokens": 2, **body}
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
    statuses, complaints, described = Counter[int](), [], Described()
    bodies = {path: [body for body, _ in described.bodies(path)] for path in BODIES}
    with httpx.Client(base_url=url, timeout=60) as client:
        for number in numbers:
            request = hostile(number, bodies)
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
    with serving(ollama=True, timeout_s=5.0) as served:
        statuses, complaints = attack(served.url, range(given.first, given.first + given.count))
        left = served.service.admission.active
    print(dict(statuses), f"{left} answers left", *complaints[:20], sep="\n")  # noqa: T201
    sys.exit(bool(complaints or left))


if __name__ == "__main__":
    main()
