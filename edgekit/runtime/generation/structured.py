"""Structured answers, by llguidance: a JSON schema, a regular expression or a grammar that the answer must follow.

Formats are untrusted: they are limited in size and depth, and compiled first in a worker process that can be killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from edgekit.common.footprint import pages_touched, private_bytes_now, return_unused
from edgekit.common.locks import ThreadLock
from edgekit.common.log import warn
from edgekit.common.subprocesses import WORKER_BYTES, ChildProcess
from edgekit.common.units import show_bytes
from edgekit.errors import EdgekitError, InvalidInput, LimitExceeded, TargetMissing, Unsupported, vendor_errors
from edgekit.runtime.generation.format_memory import MAX_FORMATS_BYTES, MAX_GROWN_BYTES, CompiledFormat, FormatMemory
from edgekit.runtime.generation.grammar_worker import MORE_BYTES, grammar_of
from edgekit.runtime.generation.patterns import as_ecma, has_open_pattern, schema_as_ecma
from edgekit.runtime.generation.schemas import close_objects

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.runtime.budget_share import BudgetShare
    from edgekit.runtime.generation.tokenizer import Codec

Result = TypeVar("Result")

MAX_FORMAT_CHARACTERS = 64 << 10
MAX_SCHEMA_DEPTH = 32
COMPILE_LIMIT_S = 5.0
_LEAST_BYTES = 64 << 10  # least size of a compiled format: smaller ones cannot be measured
_LEAST_LENT, _USUALLY_LENT = 2 << 20, 4 << 20  # to the worker while it compiles: usual schemas take up to 2 MiB
_NO_BOUNDARIES = r"a grammar cannot have \b and \B; leave them out, or use a regex"
_NOTHING_FOLLOWS = "NoExtensionBias"  # llguidance's name for a mask without any token
# Measured on Linux for 4,096 to 262,144 tokens, llguidance's own code included: 4.3 MB to 103 MB. A number for which
# the tokenizer has no token takes half as much as a token.
_INDEX_BYTES, _BYTES_A_NUMBER, _BYTES_A_TOKEN = 4 << 20, 190, 190
_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}


class Grammar(Protocol):
    """Says which tokens may come next in one answer. `allowed` returns a mask, or None if all may."""

    def allowed(self) -> NDArray[np.bool_] | None: ...
    def advance(self, token: int) -> None: ...
    def fork(self) -> Grammar: ...
    def is_finished(self) -> bool: ...
    def close(self) -> None: ...


class Grammars:
    """Compile formats for one tokenizer, and keep those that are used. Close it to end its worker.

    Args:
        codec: the tokenizer.
        vocabulary: the engine's number of tokens.
        eos: the tokens that end an answer.
        share: the budget for formats, and for the worker.
    """

    def __init__(self, codec: Codec, vocabulary: int, eos: Collection[int], share: BudgetShare) -> None:
        self._codec, self._vocabulary, self._eos = codec, vocabulary, sorted(eos)
        self._share, self._memory = share, FormatMemory(share)
        self._worker = ChildProcess(Path(__file__).with_name("grammar_worker.py"), "the grammar", COMPILE_LIMIT_S)
        self._index: Any = None  # of the vocabulary
        self._shared_bytes = 0  # measured: the library, with the first format, and the index
        self._is_worker_counted = False
        self._lock = ThreadLock()

    def compile(self, kind: str, value: Any) -> MatchedGrammar:
        """Return a grammar for one answer; `kind` is schema, regex or grammar."""
        before = private_bytes_now()
        try:
            import llguidance
        except ImportError as error:
            raise TargetMissing(f"{kind}: needs llguidance; pip install 'edgekit[structured]'") from error
        text, library = checked_text(kind, value), private_bytes_now() - before
        with self._lock:
            self._shared_bytes += max(0, library) if self._index is None else 0
            kept: MatchedGrammar | None = self._memory.find((kind, text), self._used)
            return kept or self._compiled(llguidance, kind, text)

    @property
    def bytes(self) -> int:
        """The measured memory of all formats, and of the library and the index that they share."""
        return self._shared_bytes + self._memory.bytes

    @property
    def process_id(self) -> int | None:
        """The worker's process id; None while it does not run."""
        return self._worker.process_id

    def close(self) -> None:
        self._worker.close()

    def _used(self, compiled: CompiledFormat) -> MatchedGrammar:
        return MatchedGrammar(compiled, self._memory, self._index, self._special)

    @cached_property
    def _special(self) -> NDArray[np.bool_]:
        """The tokens that the tokenizer marks as special: they write no text."""
        mask = np.zeros(self._vocabulary, np.bool_)
        added = self._codec.tokenizer.get_added_tokens_decoder()
        ids = [token for token, entry in added.items() if entry.special and token < self._vocabulary]
        mask[ids] = True
        return mask

    def _compiled(self, llguidance: Any, kind: str, text: str) -> MatchedGrammar:
        """Compile a format, first in the worker. Nothing grows here before the budget has room for it."""
        rewritten = for_llguidance(kind, text)
        if kind == "schema" and has_open_pattern(json.loads(text)):
            warn("schema: a pattern without ^ and $ may have any text around it, and bounds nothing; write ^…$")
        size = self._weighed(kind, rewritten)
        if not self._share.exclusively(lambda: self._memory.take(size)):
            raise _refusal(f"{kind}: takes", size)
        try:
            if self._index is None:
                self._index = self._built_index(llguidance, kind)
            matcher, found = self._matcher_of(llguidance, kind, rewritten)
        except BaseException:
            self._share.exclusively(lambda: self._memory.give(size))
            raise
        used = self._used(CompiledFormat((kind, text), matcher, found))
        if not self._share.exclusively(lambda: self._memory.keep(used.compiled, size)):
            del used, matcher
            return_unused()
            self._share.exclusively(lambda: self._memory.give(size))
            raise _refusal(f"{kind}: takes", found)
        return used

    def _matcher_of(self, llguidance: Any, kind: str, text: str) -> tuple[Any, int]:
        """Return a matcher at the start of an answer, and the bytes that it took."""
        with vendor_errors("llguidance"):
            limits, grammar = llguidance.LLParserLimits(**_LIMITS), grammar_of(llguidance, kind, text)
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
        return matcher, size

    def _built_index(self, llguidance: Any, kind: str) -> Any:
        """The index of the vocabulary, built with the first format."""
        size = index_bytes(self._codec, self._vocabulary)
        if not self._share.exclusively(lambda: self._share.take(size, "formats")):
            raise _no_room(f"{kind}: formats need {show_bytes(size)} for this vocabulary")
        before = private_bytes_now()
        try:
            with vendor_errors("llguidance"):
                index = index_of(llguidance, self._codec, self._vocabulary, self._eos)
        except BaseException:
            self._share.exclusively(lambda: self._share.give(size, "formats"))
            raise
        return_unused()  # before the first format is measured
        self._shared_bytes += max(0, private_bytes_now() - before)
        return index

    def _weighed(self, kind: str, text: str) -> int:
        """Compile a format in the worker; return the bytes that it may take here. Raises if it is refused."""
        if not self._is_worker_counted:
            if not self._share.exclusively(lambda: self._share.take(WORKER_BYTES, "workers")):
                raise _no_room(f"{kind}: the process that compiles formats needs {show_bytes(WORKER_BYTES)}")
            self._is_worker_counted = True
        checked = self._asked(kind, text, _USUALLY_LENT)
        if isinstance(checked, LimitExceeded):
            checked = self._asked(kind, text, MORE_BYTES)
        if isinstance(checked, LimitExceeded):
            raise checked
        if refusal := checked["error"]:
            reason = " ".join(str(refusal).split())
            raise InvalidInput(
                f"{kind}: cannot be compiled: {_NO_BOUNDARIES if 'lookarounds not' in reason else reason}"
            )
        # Over whole tokens a format takes up to a third more than over bytes.
        return max(_LEAST_BYTES, int(checked["bytes"]) * 4 // 3)

    def _asked(self, kind: str, text: str, most: int) -> dict[str, Any] | LimitExceeded:
        """Ask the worker, lending it up to `most` bytes meanwhile. Returns an error if they were too few."""
        lent = self._share.exclusively(lambda: self._memory.lend(_LEAST_LENT, most))
        began = monotonic()
        try:
            if lent < _LEAST_LENT:
                least = show_bytes(WORKER_BYTES + _LEAST_LENT)
                raise _no_room(f"{kind}: the process that compiles formats needs {least}")
            return self._worker.ask({"kind": kind, "text": text, "limits": _LIMITS, "most_bytes": lent}, 4096)
        except LimitExceeded:
            if lent < _LEAST_LENT or lent == MORE_BYTES or monotonic() - began >= COMPILE_LIMIT_S:
                raise
            return _no_room(f"{kind}: takes more than {show_bytes(lent)} to compile")
        finally:
            self._share.exclusively(lambda: self._share.give(lent, "workers"))


class MatchedGrammar:
    """The state of a grammar in one answer. Close it with the answer.

    The matcher is copied at the first use, so that a waiting request takes nothing.
    """

    def __init__(self, compiled: CompiledFormat, memory: FormatMemory, index: Any, special: NDArray[np.bool_]) -> None:
        self.compiled, self._memory, self._index, self._special = compiled, memory, index, special
        self._matcher: Any = None
        self._bits = np.zeros(0, np.uint8)  # the mask as llguidance writes it
        compiled.users.add(self)

    def allowed(self) -> NDArray[np.bool_]:
        """Return a mask over the vocabulary. The model's end tokens are allowed where the answer may end.

        Text such as `<|end|>` is written in ordinary tokens: the special token of that name is no text, and may end
        the answer. It is allowed only where nothing else is, as in a grammar that names the token.
        """
        self._growing(self._compute)
        mask: NDArray[np.bool_] = np.unpackbits(self._bits, bitorder="little")[: self._special.size].astype(np.bool_)
        if not self._matcher.is_accepting() and (mask & self._special).any():
            ordinary = mask & ~self._special
            ordinary[self._spelt()] = True
            mask = ordinary if ordinary.any() else mask
        if self._matcher.is_error():
            raise self._failure()
        if not mask.any():
            raise self._nothing_can_follow()
        return mask

    def _compute(self) -> None:
        """Compute the mask into a reused array, so that any growth of memory is the format's."""
        if not self._bits.size:
            self._bits = np.zeros(-(-self._special.size // 32) * 4, np.uint8)  # words of 32 bits
        self._own_matcher().unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)

    def _spelt(self) -> list[int]:
        """The token of the next byte where only one byte can follow; llguidance may then allow special tokens alone."""
        forced = bytes(self._matcher.compute_ff_bytes())
        tokens: list[int] = self._index.tokenize_bytes(forced[:1]) if forced else []
        return tokens if tokens and self._matcher.deep_copy().consume_token(tokens[0]) else []

    def advance(self, token: int) -> None:
        """Advance by a chosen token."""
        if not self._growing(lambda: self._own_matcher().consume_token(token)):
            raise self._failure()

    def fork(self) -> MatchedGrammar:
        """Return an independent copy."""
        other = MatchedGrammar(self.compiled, self._memory, self._index, self._special)
        other._matcher = self._growing(lambda: self._own_matcher().deep_copy())
        return other

    def is_finished(self) -> bool:
        """Return True where the answer is complete and nothing can follow."""
        finished: bool = self._own_matcher().is_stopped()
        return finished

    def close(self) -> None:
        """Release the copy; its answer has ended."""
        self._matcher, self._bits = None, self._bits[:0].copy()
        self._memory.release(self.compiled, self)

    def _own_matcher(self) -> Any:
        if self._matcher is None:
            self._matcher = self.compiled.matcher.deep_copy()
        return self._matcher

    def _growing(self, work: Callable[[], Result]) -> Result:
        """Do `work` and count the memory that it takes. Raises LimitExceeded if there was no room for it."""
        touched, before = pages_touched(), private_bytes_now()
        result = work()
        # Other threads take memory too; this one took some only if it touched new pages.
        grown = private_bytes_now() - before if touched is None or touched != pages_touched() else 0
        if not self._memory.grow(self.compiled, grown):
            grown = self.compiled.grown_bytes
            raise _refusal(f"{self.compiled.key[0]}: has grown by", grown, "while it was used", MAX_GROWN_BYTES)
        return result

    def _failure(self) -> EdgekitError:
        lines = self._matcher.get_error().strip().splitlines()
        reason = lines[0][:200] if lines else "no reason given"
        if _NOTHING_FOLLOWS in reason:
            return self._nothing_can_follow()
        self._memory.drop(self.compiled)  # copies share the lexer, which has reached its limits
        return LimitExceeded(f"the grammar ran past its limits: {reason}")

    @staticmethod
    def _nothing_can_follow() -> EdgekitError:
        return Unsupported(
            "no token of this vocabulary can continue the answer, so the format cannot be written with it; "
            "allow other characters in the schema or pattern"
        )


def _refusal(what: str, size: int, when: str = "compiled", most: int = MAX_FORMATS_BYTES) -> LimitExceeded:
    """The error for a format that takes `size` bytes, or has grown by as many."""
    need = f"{what} {show_bytes(size)} {when}"
    if size > most:
        return LimitExceeded(f"{need}, and {show_bytes(most)} are allowed; make it simpler")
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


def index_bytes(codec: Codec, vocabulary: int) -> int:
    """Return the bytes that an index takes for the engine's number of tokens."""
    return _INDEX_BYTES + _BYTES_A_NUMBER * vocabulary + _BYTES_A_TOKEN * min(vocabulary, codec.vocabulary)


def index_of(llguidance: Any, codec: Codec, vocabulary: int, eos: Sequence[int]) -> Any:
    """Build llguidance's index for the engine's number of tokens. Tokens that the tokenizer lacks are empty.

    The index is built from the bytes of each token. From a tokenizer's file, llguidance would build a second tokenizer,
    which takes twice the memory (Gemma 3: 236 MB instead of 103), and 340 MB more while it is built.
    """
    return llguidance.LLTokenizer(_Words(codec, vocabulary, eos), n_vocab=vocabulary, eos_token=list(eos) or None)


class _Words:
    """Adapter from `Codec` to the tokenizer interface that `llguidance.LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, codec: Codec, vocabulary: int, eos: Sequence[int]) -> None:
        self._codec = codec
        self.eos_token_id = eos[0] if eos else 0
        self.tokens = _TokenBytes(codec, vocabulary)
        self.special_token_ids = [token for token in range(vocabulary) if codec.is_special(token)]

    def __call__(self, text: str) -> list[int]:
        return self._codec.encode(text, add_special_tokens=False)


class _TokenBytes(Sequence[bytes]):
    """The bytes of each token, made one by one: a list of them would leave megabytes of holes in the heap."""

    def __init__(self, codec: Codec, vocabulary: int) -> None:
        self._codec, self._vocabulary = codec, vocabulary

    def __len__(self) -> int:
        return self._vocabulary

    def __getitem__(self, token: Any) -> Any:
        if token >= self._vocabulary:
            raise IndexError(token)
        return self._codec.token_bytes(token)
