"""The worker process that first compiles a grammar under limits of time and memory, since grammars are untrusted.

It does not import edgekit and may be killed at any time. Requests and answers are JSON, each after its length in four
bytes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MAX_MEMORY_BYTES = 2 << 30  # of address space


def serve() -> None:
    """Answer requests on stdin until it closes."""
    import llguidance

    _confine()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(size := source.read(4)) == 4:
        request = json.loads(source.read(int.from_bytes(size, "big")))
        data = json.dumps(answer(llguidance, request) if request else {}).encode()
        sink.write(len(data).to_bytes(4, "big") + data)
        sink.flush()


def answer(llguidance: Any, request: dict[str, Any]) -> dict[str, str]:
    """Return `{"error": ...}`; the error is empty if the grammar compiles within its limits."""
    try:
        grammar = grammar_of(llguidance, request["kind"], request["text"])
        limits = llguidance.LLParserLimits(**request["limits"])
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits)
        return {"error": str(messages[0])[:500] if failed else ""}
    except Exception as error:
        return {"error": str(error)[:500] or type(error).__name__}


def grammar_of(llguidance: Any, kind: str, text: str) -> str:
    """Convert a schema, a regex, or a grammar in Lark's or llama.cpp's notation for llguidance."""
    if kind == "schema":
        # Allow at most one space between the parts: small models would fill an answer with white space.
        options = {"whitespace_pattern": "[ ]?"}
        grammar: str = llguidance.LLMatcher.grammar_from_json_schema(text, defaults=options)
    else:
        grammar = llguidance.grammar_from(kind, text)
    return grammar


def _confine() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    except (ImportError, ValueError, OSError):
        return


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    serve()
