"""Structured answers, by llguidance: a JSON schema, a regular expression or a grammar that the answer must follow.

Formats are untrusted: they are limited in size and depth, and compiled first in a worker process that can be killed.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edgekit.common.malloc import return_unused
from edgekit.common.subprocesses import WORKER_BYTES, ChildProcess
from edgekit.common.units import show_bytes
from edgekit.errors import EdgekitError, InvalidInput, LimitExceeded, TargetMissing, Unsupported, vendor_errors
from edgekit.runtime.generation.grammar_worker import grammar_of
from edgekit.runtime.generation.patterns import as_ecma, schema_as_ecma
from edgekit.runtime.generation.schemas import close_objects
from edgekit.runtime.generation.vocabulary_index import index_bytes, index_of
from edgekit.runtime.memory.footprint import private_bytes_now

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.runtime.generation.tokenizer import Codec
    from edgekit.runtime.memory.budget import BudgetClass

MAX_FORMAT_CHARACTERS = 64 << 10
MAX_SCHEMA_DEPTH = 32
COMPILE_LIMIT_S = 5.0
MAX_CACHED_BYTES = 64 << 20  # of compiled formats; the least recently used ones are dropped
_SPARE_BYTES = 1 << 20  # a format of this size may serve one answer without room
_LEAST_BYTES = 64 << 10  # least size of a compiled format: smaller ones cannot be measured
_NO_BOUNDARIES = r"a grammar cannot have \b and \B; leave them out, or use a regex"
_NOTHING_FOLLOWS = "NoExtensionBias"  # llguidance's name for a mask without any token
_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}


class CompiledFormat(NamedTuple):
    """A matcher at the start of an answer, and the memory that it took."""

    matcher: Any
    bytes: int


class Grammars:
    """Compile formats for one tokenizer, and keep those that are used. Close it to end its worker.

    Args:
        codec: the tokenizer.
        vocabulary: the engine's number of tokens.
        eos: the tokens that end an answer.
        take: takes bytes of the memory budget, for `formats` or `workers`, or returns False.
        give: gives back those of formats.
    """

    def __init__(
        self,
        codec: Codec,
        vocabulary: int,
        eos: Collection[int],
        *,
        take: Callable[[int, BudgetClass], bool] = lambda size, name: True,
        give: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._codec, self._vocabulary, self._eos = codec, vocabulary, sorted(eos)
        self._take, self._give = take, give
        self._worker = ChildProcess(Path(__file__).with_name("grammar_worker.py"), "the grammar", COMPILE_LIMIT_S)
        self._index: Any = None  # of the vocabulary
        self._cached: OrderedDict[tuple[str, str], CompiledFormat] = OrderedDict()
        self._is_worker_counted = False
        self._lock = Lock()

    def compile(self, kind: str, value: Any) -> MatchedGrammar:
        """Return a grammar for one answer; `kind` is schema, regex or grammar."""
        try:
            import llguidance
        except ImportError as error:
            raise TargetMissing(f"{kind}: needs llguidance; pip install 'edgekit[structured]'") from error
        text = checked_text(kind, value)
        with self._lock:
            compiled = self._cached.get((kind, text)) or self._compiled(llguidance, kind, text)
            if not self._keep((kind, text), compiled) and (size := compiled.bytes) > _SPARE_BYTES:
                del compiled
                return_unused()
                raise _too_large(kind, size)
            return MatchedGrammar(compiled.matcher.deep_copy(), self._index, self._special_mask())

    @property
    def bytes(self) -> int:
        """The memory of the formats that are kept, and of the index that they share."""
        index = index_bytes(self._vocabulary) if self._index is not None else 0
        return index + self._formats_bytes()

    @property
    def process_id(self) -> int | None:
        """The worker's process id; None while it does not run."""
        return self._worker.process_id

    def _formats_bytes(self) -> int:
        return sum(compiled.bytes for compiled in list(self._cached.values()))

    def _special_mask(self) -> NDArray[np.bool_]:
        """The tokens that the tokenizer marks as special: they write no text."""
        mask = np.zeros(self._vocabulary, np.bool_)
        added = self._codec.tokenizer.get_added_tokens_decoder()
        ids = [token for token, entry in added.items() if entry.special and token < self._vocabulary]
        mask[ids] = True
        return mask

    def close(self) -> None:
        self._worker.close()

    def _keep(self, key: tuple[str, str], compiled: CompiledFormat) -> bool:
        """Keep a format for the next answer, instead of the least recently used ones; return False without room."""
        if key in self._cached:
            self._cached.move_to_end(key)
            return True
        fits = self._take_room(compiled.bytes)
        if fits:
            self._cached[key] = compiled
        return fits

    def _take_room(self, size: int) -> bool:
        """Take memory for a format, dropping others for it; return False without room."""
        if size > MAX_CACHED_BYTES:
            return False
        while self._cached and self._formats_bytes() + size > MAX_CACHED_BYTES:
            self._drop_oldest()
        while not (fits := self._take(size, "formats")) and self._cached:
            self._drop_oldest()
        return fits

    def _drop_oldest(self) -> None:
        size = self._cached.popitem(last=False)[1].bytes
        return_unused()
        self._give(size)

    def _built_index(self, llguidance: Any, kind: str) -> Any:
        """The index of the vocabulary, built with the first format."""
        size = index_bytes(self._vocabulary)
        if not self._take(size, "formats"):
            raise _no_room(f"{kind}: formats need {show_bytes(size)} for this vocabulary")
        try:
            index = index_of(llguidance, self._codec, self._vocabulary, self._eos)
        except BaseException:
            self._give(size)
            raise
        return_unused()  # before the first format is measured
        return index

    def _compiled(self, llguidance: Any, kind: str, text: str) -> CompiledFormat:
        text = for_llguidance(kind, text)
        if not self._is_worker_counted:
            if not self._take(WORKER_BYTES, "workers"):
                raise _no_room(f"{kind}: the process that compiles formats needs {show_bytes(WORKER_BYTES)}")
            self._is_worker_counted = True
        request = {"kind": kind, "text": text, "limits": _LIMITS}
        checked = self._worker.ask(request, 4096)
        if refusal := checked["error"]:
            reason = " ".join(str(refusal).split())
            raise InvalidInput(
                f"{kind}: cannot be compiled: {_NO_BOUNDARIES if 'lookarounds not' in reason else reason}"
            )
        # Over whole tokens a format takes up to a third more than over bytes. Nothing grows here without room for that.
        if (size := int(checked["bytes"]) * 4 // 3) > _SPARE_BYTES:
            if not self._take_room(size):
                raise _too_large(kind, size)
            self._give(size)
        with vendor_errors("llguidance"):
            if self._index is None:
                self._index = self._built_index(llguidance, kind)
            limits = llguidance.LLParserLimits(**_LIMITS)
            grammar = grammar_of(llguidance, kind, text)
            before = private_bytes_now()
            matcher = llguidance.LLMatcher(self._index, grammar, limits=limits)
            matcher.compute_logit_bias()  # the first mask is what takes most of the memory
            size = max(_LEAST_BYTES, private_bytes_now() - before)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:300]
            if _NOTHING_FOLLOWS in reason:
                reason = "nothing can match it, or no token of this vocabulary can write it; allow other characters"
            del matcher
            return_unused()  # a format that was refused has grown up to its limits
            raise InvalidInput(f"{kind}: cannot be compiled: {reason}")
        return CompiledFormat(matcher, size)


class MatchedGrammar:
    """The state of a grammar in one answer."""

    def __init__(self, matcher: Any, index: Any, special: NDArray[np.bool_]) -> None:
        self._matcher, self._index, self._special = matcher, index, special

    def allowed(self) -> NDArray[np.bool_]:
        """Return a mask over the vocabulary. The model's end tokens are allowed where the answer may end.

        Text such as `<|end|>` is written in ordinary tokens: the special token of that name is no text, and may end
        the answer. It is allowed only where nothing else is, as in a grammar that names the token.
        """
        bias = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        mask: NDArray[np.bool_] = bias[: self._special.size].astype(np.bool_)
        if not self._matcher.is_accepting() and (mask & self._special).any():
            ordinary = mask & ~self._special
            ordinary[self._spelt()] = True
            mask = ordinary if ordinary.any() else mask
        if self._matcher.is_error():
            raise self._failure()
        if not mask.any():
            raise self._nothing_can_follow()
        return mask

    def _spelt(self) -> list[int]:
        """The token of the next byte where only one byte can follow; llguidance may then allow special tokens alone."""
        forced = bytes(self._matcher.compute_ff_bytes())
        tokens: list[int] = self._index.tokenize_bytes(forced[:1]) if forced else []
        return tokens if tokens and self._matcher.deep_copy().consume_token(tokens[0]) else []

    def advance(self, token: int) -> None:
        """Advance by a chosen token."""
        if not self._matcher.consume_token(token):
            raise self._failure()

    def _failure(self) -> EdgekitError:
        reason = _first_line(self._matcher.get_error())
        if _NOTHING_FOLLOWS in reason:
            return self._nothing_can_follow()
        return LimitExceeded(f"the grammar ran past its limits: {reason}")

    @staticmethod
    def _nothing_can_follow() -> EdgekitError:
        return Unsupported(
            "no token of this vocabulary can continue the answer, so the format cannot be written with it; "
            "allow other characters in the schema or pattern"
        )

    def fork(self) -> MatchedGrammar:
        """Return an independent copy."""
        return MatchedGrammar(self._matcher.deep_copy(), self._index, self._special)

    def is_finished(self) -> bool:
        """Return True where the answer is complete and nothing can follow."""
        finished: bool = self._matcher.is_stopped()
        return finished


def _too_large(kind: str, size: int) -> LimitExceeded:
    need = f"{kind}: takes {show_bytes(size)} compiled"
    if size > MAX_CACHED_BYTES:
        return LimitExceeded(f"{need}, and {show_bytes(MAX_CACHED_BYTES)} are allowed; make it simpler")
    return _no_room(need)


def _no_room(need: str) -> LimitExceeded:
    return LimitExceeded(
        f"{need}, and the memory budget has no room for that; open with a larger `memory`, fewer sequences or fewer "
        "prefixes"
    )


def checked_text(kind: str, value: Any) -> str:
    if kind != "schema":
        text = str(value)
    else:
        try:
            tree = json.loads(value) if isinstance(value, str) else value
            if not isinstance(tree, dict):
                raise InvalidInput("schema: must be a JSON object")
            if _depth(tree) > MAX_SCHEMA_DEPTH:
                raise LimitExceeded(f"schema: nested more than {MAX_SCHEMA_DEPTH} deep")
            text = json.dumps(tree, sort_keys=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidInput(f"schema: not a JSON object: {str(error)[:200]}") from error
    if len(text) > MAX_FORMAT_CHARACTERS:
        raise LimitExceeded(f"{kind}: {len(text):,} characters; at most {MAX_FORMAT_CHARACTERS:,} are compiled")
    return text


def for_llguidance(kind: str, text: str) -> str:
    """Close the objects of a schema, and rewrite patterns so that they mean what they mean in ECMA-262."""
    if kind == "schema":
        schema = close_objects(schema_as_ecma(json.loads(text)))
        return json.dumps(schema, sort_keys=False, allow_nan=False)
    return as_ecma(text) if kind == "regex" else text


def _depth(tree: Any) -> int:
    """Return the depth of a tree, without recursion."""
    level, depth = [tree], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        depth += 1
        branches = [node.values() if isinstance(node, dict) else node for node in level]
        level = [leaf for branch in branches for leaf in branch if isinstance(leaf, dict | list)]
    return depth


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else "no reason given"
