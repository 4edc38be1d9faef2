"""Answers of a given shape (a JSON schema, a regular expression, a grammar), by llguidance.

A shape is untrusted: bounded in size and depth, and compiled first in a killable worker. It knows nothing of sampling;
the loop masks each row with what is allowed after the tokens before it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekit.errors import InvalidInput, LimitExceeded, TargetFailed, TargetMissing, vendor_errors
from edgekit.runtime.grammar_worker import grammar_of
from edgekit.runtime.patterns import as_ecma, schema_as_ecma
from edgekit.runtime.worker import Worker

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.runtime.text import Codec

MAX_SHAPE_CHARACTERS = 64 << 10
MAX_SCHEMA_DEPTH = 32
COMPILE_LIMIT_S = 5.0
_MAX_KEPT = 32  # compiled shapes
_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}


class Grammars:
    """Compiles shapes for one tokenizer; the same shape is compiled once. Close it to end its worker."""

    def __init__(self, codec: Codec, vocabulary: int, eos: Collection[int]) -> None:
        self._codec, self._vocabulary, self._eos = codec, vocabulary, sorted(eos)
        self._worker = Worker(Path(__file__).with_name("grammar_worker.py"), "the grammar", COMPILE_LIMIT_S)
        self._tokenizer: Any = None
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = Lock()

    def compile(self, kind: str, shape: Any) -> MatchedGrammar:
        """A fresh grammar for one answer; `kind` is schema, regex or grammar."""
        try:
            import llguidance
        except ImportError as error:
            raise TargetMissing(f"{kind}: needs llguidance; pip install 'edgekit[structured]'") from error
        text = _checked_text(kind, shape)
        with self._lock:
            if (kind, text) not in self._kept:
                self._kept[kind, text] = self._compiled(llguidance, kind, text)
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end((kind, text))
            return MatchedGrammar(self._kept[kind, text].deep_copy(), self._vocabulary)

    def close(self) -> None:
        self._worker.close()

    def _compiled(self, llguidance: Any, kind: str, text: str) -> Any:
        text = _with_ecma_patterns(kind, text)
        request = {"kind": kind, "text": text, "limits": _LIMITS}
        refusal = self._worker.ask(request, 4096)["error"]
        if refusal:
            raise InvalidInput(f"{kind}: cannot be compiled: {' '.join(str(refusal).split())}")
        with vendor_errors("llguidance"):
            if self._tokenizer is None:
                source = self._codec.tokenizer.to_str()
                self._tokenizer = llguidance.LLTokenizer(source, n_vocab=self._vocabulary, eos_token=self._eos or None)
            limits = llguidance.LLParserLimits(**_LIMITS)
            grammar = grammar_of(llguidance, kind, text)
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, limits=limits)
        if matcher.is_error():
            raise InvalidInput(f"{kind}: cannot be compiled: {' '.join(matcher.get_error().split())[:300]}")
        return matcher


class MatchedGrammar:
    """What may come next in one answer."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> NDArray[np.bool_]:
        """One truth per token; the model's end of text is allowed where the answer may end."""
        bias = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        mask: NDArray[np.bool_] = bias[: self._vocabulary].astype(np.bool_)
        if self._matcher.is_error():
            raise LimitExceeded(f"the grammar ran past its limits: {_first_line(self._matcher.get_error())}")
        if not mask.any():
            raise TargetFailed("llguidance: no token of this vocabulary can go on; the shape cannot be written with it")
        return mask

    def advance(self, token: int) -> None:
        """`token` was chosen."""
        if not self._matcher.consume_token(token):
            raise LimitExceeded(f"the grammar ran past its limits: {_first_line(self._matcher.get_error())}")

    def fork(self) -> MatchedGrammar:
        """One that goes its own way from here."""
        return MatchedGrammar(self._matcher.deep_copy(), self._vocabulary)

    def is_finished(self) -> bool:
        """Whether nothing but the end of the text may follow."""
        finished: bool = self._matcher.is_stopped()
        return finished


def _checked_text(kind: str, shape: Any) -> str:
    if kind != "schema":
        text = str(shape)
    else:
        try:
            tree = json.loads(shape) if isinstance(shape, str) else shape
            if not isinstance(tree, dict):
                raise InvalidInput("schema: must be a JSON object")
            if _depth(tree) > MAX_SCHEMA_DEPTH:
                raise LimitExceeded(f"schema: nested more than {MAX_SCHEMA_DEPTH} deep")
            text = json.dumps(tree, sort_keys=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidInput(f"schema: not a JSON object: {str(error)[:200]}") from error
    if len(text) > MAX_SHAPE_CHARACTERS:
        raise LimitExceeded(f"{kind}: {len(text):,} characters; at most {MAX_SHAPE_CHARACTERS:,} are compiled")
    return text


def _with_ecma_patterns(kind: str, text: str) -> str:
    """A checked shape whose patterns say for llguidance what they mean in ECMA-262."""
    if kind == "schema":
        return json.dumps(schema_as_ecma(json.loads(text)), sort_keys=False, allow_nan=False)
    return as_ecma(text) if kind == "regex" else text


def _depth(tree: Any) -> int:
    """How deep the tree goes, without recursion of our own."""
    level, depth = [tree], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        depth += 1
        branches = [node.values() if isinstance(node, dict) else node for node in level]
        level = [leaf for branch in branches for leaf in branch if isinstance(leaf, dict | list)]
    return depth


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "no reason given"
