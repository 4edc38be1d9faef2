"""The worker process that first compiles a grammar under limits of time and memory, since grammars are untrusted.

It also computes the first mask, which is what takes most of the memory, over a vocabulary of single bytes. Each request
says how much more memory the process may take for it.

It does not import edgekit and may be killed at any time. Requests and answers are JSON, each after its length in four
bytes.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from pathlib import Path
from typing import Any

MORE_BYTES = 128 << 20  # of address space on top of what the process starts with: the largest format has 64 MiB
MAX_MEMORY_BYTES = 2 << 30  # of address space, where the OS does not say what it has


def serve() -> None:
    """Answer requests on stdin until it closes."""
    import llguidance

    tokens = llguidance.LLTokenizer(_Bytes(), n_vocab=257, eos_token=[256])
    before = _pages()[0] or MAX_MEMORY_BYTES
    _confine(before, MORE_BYTES)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(size := source.read(4)) == 4:
        request = json.loads(source.read(int.from_bytes(size, "big")))
        if request:
            _confine(before, request["most_bytes"])
        data = json.dumps(answer(llguidance, tokens, request) if request else {}).encode()
        sink.write(len(data).to_bytes(4, "big") + data)
        sink.flush()


class _Bytes:
    """A vocabulary of all single bytes and an end, as `llguidance.LLTokenizer` reads it."""

    is_tokenizer_wrapper = True
    bos_token_id, eos_token_id = None, 256
    special_token_ids = (256,)
    tokens = tuple(bytes([byte]) for byte in range(256)) + (b"<end>",)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def answer(llguidance: Any, tokens: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return `{"error": ..., "bytes": ...}`: what the grammar took; no error if it compiles within its limits."""
    try:
        grammar = grammar_of(llguidance, request["kind"], request["text"])
        limits = llguidance.LLParserLimits(**request["limits"])
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits)
        if failed:
            return {"error": str(messages[0])[:500], "bytes": 0}
        before = _pages()[1]
        matcher = llguidance.LLMatcher(tokens, grammar, limits=limits)
        matcher.compute_logit_bias()
        taken = max(0, _pages()[1] - before)
        del matcher
        _return_unused()
        return {"error": "", "bytes": taken}
    except MemoryError:
        raise  # ends the process, which says that the memory was too little
    except Exception as error:
        return {"error": str(error)[:500] or type(error).__name__, "bytes": 0}


def _pages() -> tuple[int, int]:
    """Return the bytes of address space and of private memory; zeros where the OS does not say."""
    try:
        size, resident, shared = map(int, Path("/proc/self/statm").read_bytes().split()[:3])
    except OSError:
        return 0, 0
    return size * mmap.PAGESIZE, (resident - shared) * mmap.PAGESIZE


def _return_unused() -> None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return


def grammar_of(llguidance: Any, kind: str, text: str) -> str:
    """Convert a schema, a regex, or a grammar in Lark's or llama.cpp's notation for llguidance."""
    if kind == "schema":
        # Allow at most one space between the parts: small models would fill an answer with white space.
        options = {"whitespace_pattern": "[ ]?"}
        grammar: str = llguidance.LLMatcher.grammar_from_json_schema(text, defaults=options)
    else:
        grammar = llguidance.grammar_from(kind, text)
    return grammar


def _confine(before: int, more: int) -> None:
    """Allow `more` bytes of address space on top of `before`, the bytes at the start; at most `MORE_BYTES` more."""
    if sys.platform == "win32":
        return
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_AS, (before + min(more, MORE_BYTES), before + MORE_BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    except (ValueError, OSError):
        return


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    serve()
