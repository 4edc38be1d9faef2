"""Structured answers follow their format with drafts, stop strings and batching."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from runtimes import codec, make_runtime, refusal

from edgekit.common.footprint import private_bytes_now, return_unused
from edgekit.common.proc import memory_sizes
from edgekit.common.subprocesses import WORKER_BYTES
from edgekit.errors import EdgekitError, InvalidInput, LimitExceeded, TargetMissing
from edgekit.model.source import open_source
from edgekit.runtime.generation import format_memory
from edgekit.runtime.generation.grammar_worker import grammar_of
from edgekit.runtime.generation.structured import MatchedGrammar, checked_text, for_llguidance, index_bytes, index_of
from edgekit.runtime.generation.tokenizer import read_codec
from edgekit.runtime.memory.budget import MemoryBudget
from edgekit.runtime.stream import Stream

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_tokens": 200}
EOS = frozenset({codec().tokenizer.token_to_id("</s>")})


@pytest.fixture(scope="module")
def runtime():
    with make_runtime(eos=EOS, context=1024) as opened:
        yield opened


def test_a_pattern_that_bounds_nothing_is_told_once(runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit.common.log.slow.handlers", [])  # those of a command that ran before
    schema = {"type": "object", "properties": {"pattern": {"type": "string", "pattern": r"a\d"}}}
    with pytest.warns(UserWarning, match="a pattern without"):
        runtime.generate("the cat", schema=schema, max_tokens=2)
    runtime.generate("the cat", schema=schema, max_tokens=2)  # it is compiled already
    schema["properties"]["pattern"]["pattern"] = r"^a\d$"
    runtime.generate("the cat", schema=schema, max_tokens=2)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("as_text", [False, True], ids=["object", "text"])
def test_an_answer_follows_its_schema(runtime, seed: int, as_text: bool) -> None:
    schema = json.dumps(PERSON) if as_text else PERSON
    answer = runtime.generate("the cat", schema=schema, seed=seed, **SAMPLING)
    found = json.loads(answer.text)
    assert answer.finish_reason == "stop"
    assert set(found) == {"name", "age"} and len(found["name"]) <= 12 and 0 <= found["age"] <= 99


@pytest.mark.parametrize("shape", [{"regex": "a</s>b"}, {"grammar": 'start: "a" "</s>" "b"'}])
def test_the_name_of_a_special_token_is_written_as_text(runtime, shape: dict[str, str]) -> None:
    """The token itself would end the answer in the middle of its format."""
    answer = runtime.generate("the cat", seed=1, **shape, **SAMPLING)
    assert (answer.text, answer.finish_reason) == ("a</s>b", "stop")
    assert not EOS & set(answer.tokens)


@settings(deadline=None, max_examples=15)
@given(
    regex=st.sampled_from(["[ab]{3,9}", "(the|cat) (sat|on)", r"\d{2}-\w{2}", r"[^\W\d]{3}", "é+🙂", "a|"]),
    seed=st.integers(0, 50),
)
def test_an_answer_matches_its_regex(runtime, regex: str, seed: int) -> None:
    answer = runtime.generate("the cat", regex=regex, seed=seed, **SAMPLING)
    assert re.fullmatch(regex, answer.text, re.ASCII) or answer.finish_reason == "length"


GRAMMARS = {
    "Lark": 'start: "(" start ")" | WORD\nWORD: /[abc]{1,2}/',
    "GBNF": 'root ::= "(" root ")" | word\nword ::= [abc] | [abc] [abc]',
}


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_an_answer_follows_its_grammar(runtime, grammar: str) -> None:
    for seed in range(4):
        answer = runtime.generate("the cat", grammar=grammar, seed=seed, **SAMPLING)
        body = answer.text.lstrip("(")
        depth = len(answer.text) - len(body)
        assert re.fullmatch(r"[abc]{1,2}" + r"\)" * depth, body) or answer.finish_reason == "length"


def test_batching_with_other_formats_changes_nothing(runtime) -> None:
    asked = [{"schema": PERSON}, {"regex": "[ab]{5}"}, {}, {"grammar": GRAMMARS["Lark"]}]
    alone = [runtime.generate("the cat", seed=5, **one, **SAMPLING).text for one in asked]
    streams = [runtime.submit("the cat", seed=5, **one, **SAMPLING) for one in asked]
    assert [stream.answer().text for stream in streams] == alone


def test_ignore_eos_does_not_break_the_format(runtime) -> None:
    assert len(runtime.generate("a", regex="[ab]{5}", ignore_eos=True, max_tokens=50).text) == 5


EXPLODES = "((a{0,500}){0,500}){0,500}b{1,99999}(.{0,5000}x){9}"
BAD: dict[str, tuple[str, Any, type[EdgekitError]]] = {
    "an open regex": ("regex", "(", InvalidInput),
    "a broken grammar": ("grammar", "start: nothing_of_this", InvalidInput),
    "a schema that is no JSON": ("schema", "{", InvalidInput),
    "a schema that is no object": ("schema", "[1]", InvalidInput),
    "an unknown type": ("schema", {"type": "person"}, InvalidInput),
    "a reference to nothing": ("schema", {"$ref": "#/$defs/missing"}, InvalidInput),
    "a reference elsewhere": ("schema", {"$ref": "file:///etc/passwd"}, InvalidInput),
    "NaN": ("schema", {"const": float("nan")}, InvalidInput),
    "a large schema": ("schema", {"enum": ["x" * 100 + str(place) for place in range(2000)]}, LimitExceeded),
    "a deep schema": ("schema", json.loads('{"items":' * 60 + "{}" + "}" * 60), LimitExceeded),
    "very deep text": ("schema", '{"items":' * 50_000 + "{}" + "}" * 50_000, InvalidInput),
    "a large regex": ("regex", "a" * 70_000, LimitExceeded),
    "a regex that explodes": ("regex", EXPLODES, InvalidInput),
    "an object in a set": ("schema", {"enum": [{1, 2}]}, InvalidInput),
}  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "kind"), BAD.values(), ids=BAD)
def test_invalid_format_is_refused_in_one_line(runtime, name: str, shape: Any, kind: type[EdgekitError]) -> None:
    began = time.monotonic()
    error = refusal(lambda: runtime.generate("the cat", **{name: shape}, max_tokens=20))
    # An engine may be clever enough to compile a regex that explodes in others.
    assert isinstance(error, kind) or (error is None and shape == EXPLODES)
    assert time.monotonic() - began < 15
    assert runtime.engine.states == []
    assert len(runtime.generate("a", regex="[ab]{5}").text) == 5


def test_recursion_through_references_is_bounded(runtime) -> None:
    tree = {"$defs": {"t": {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}, "b": {"$ref": "#/$defs/t"}}}}}
    answer = runtime.generate("a", schema={**tree, "$ref": "#/$defs/t"}, temperature=1.0, seed=1, max_tokens=60)
    assert answer.finish_reason in ("stop", "length")
    cycle = {"$defs": {"t": {"$ref": "#/$defs/t"}}, "$ref": "#/$defs/t"}
    refusal(lambda: runtime.generate("a", schema=cycle, max_tokens=5))
    assert runtime.engine.states == []


def test_kept_formats_are_in_the_budget_and_the_oldest_give_way(runtime) -> None:
    index = index_bytes(runtime.codec, runtime.engine.capabilities.vocabulary)
    with make_runtime(budget=MemoryBudget(WORKER_BYTES + index + (4 << 20)), context=64, sequences=1) as runtime:
        for place in range(1, 41):
            runtime.generate("a", regex=f"[ab]{{{place}}}", max_tokens=1)
        kept = runtime._budget.taken["formats"]
        assert index < kept <= index + (4 << 20)
        runtime.generate("a", regex="[ab]{40}", max_tokens=1)
        assert runtime._budget.taken["formats"] == kept, "a kept format is not taken twice"
        assert runtime._budget.taken["workers"] == WORKER_BYTES, "what the worker was lent is given back"
    for room, reason in (
        (-WORKER_BYTES // 2, "the process that compiles formats needs 11 MiB"),
        (1 << 19, "the process that compiles formats needs 13 MiB"),
        (3 << 20, "formats need .* MiB for this vocabulary"),
    ):
        with make_runtime(budget=MemoryBudget(WORKER_BYTES + room), context=8, sequences=1) as runtime:
            with pytest.raises(LimitExceeded, match=f"regex: {reason}"):
                runtime.generate("a", regex="[ab]{3}")
            assert runtime.generate("a").text and not runtime._budget.taken.get("formats")


def test_the_index_is_counted_by_tokens_and_not_by_numbers_without_one() -> None:
    """Models have more rows than their tokenizer has tokens."""
    llguidance, many = pytest.importorskip("llguidance"), 248_320
    index_of(llguidance, codec(), codec().vocabulary, [2])  # its code is loaded
    return_unused()
    before = private_bytes_now()
    index = index_of(llguidance, codec(), many, [2])
    return_unused()
    taken, counted = private_bytes_now() - before, index_bytes(codec(), many)
    assert index.vocab_size == many
    assert taken <= counted <= taken + (16 << 20)


def test_formats_in_use_do_not_give_way(runtime) -> None:
    """Dropping a format that an answer uses would free nothing."""
    most = WORKER_BYTES + index_bytes(runtime.codec, runtime.engine.capabilities.vocabulary) + (3 << 20)
    with make_runtime(budget=MemoryBudget(most), context=64, sequences=1) as opened:
        streams: list[Stream] = []

        def ask() -> None:
            streams.append(opened.submit("a", regex=f"[ab]{{{len(streams) + 5}}}", max_tokens=2))

        while (error := refusal(ask)) is None and len(streams) < 100:
            continue
        assert isinstance(error, LimitExceeded) and "the memory budget has no room" in str(error)
        assert len(streams) > 5 and {stream.answer().finish_reason for stream in streams} == {"length"}
        ask()
        assert streams[-1].answer().text, "the others have ended, and give way"
        assert sum(opened._budget.taken.values()) <= most


@pytest.mark.parametrize(("free", "fits"), [(8 << 20, False), (64 << 20, True)])
def test_what_compiles_takes_no_more_than_is_free(runtime, free: int, fits: bool) -> None:
    budget = MemoryBudget(WORKER_BYTES + free)
    lent: list[int] = []
    with make_runtime(budget=budget, context=64, sequences=1) as opened:
        ask = opened._grammars._worker.ask

        def asked(request: Any, limit: int) -> Any:
            lent.append(request["most_bytes"])
            assert budget.taken["workers"] == WORKER_BYTES + lent[-1]
            return ask(request, limit)

        opened._grammars._worker.ask = asked  # type: ignore[method-assign]
        error = refusal(lambda: opened.generate("a", regex="(a{1000}){30}", max_tokens=1))  # 16 MiB to compile
        assert budget.taken["workers"] == WORKER_BYTES
    assert len(lent) == 2 and lent[0] < lent[1] <= free
    if fits:
        assert error is None
    else:
        assert isinstance(error, LimitExceeded)
        assert re.search("takes more than .* MiB to compile, and the memory budget has no room", str(error))


def _written(grammar: MatchedGrammar, letters: str, most: int) -> None:
    """Write random letters that the grammar allows."""
    tokens, chance = [codec().tokenizer.token_to_id(letter) for letter in letters], random.Random(1)
    for _ in range(most):
        mask = grammar.allowed()
        grammar.advance(chance.choice([token for token in tokens if mask[token]]))


@pytest.mark.parametrize(("room", "reason"), [(256, "16 MiB are allowed"), (4, "the memory budget has no room")])
def test_what_a_format_grows_while_an_answer_is_written_counts(runtime, room: int, reason: str) -> None:
    """Copies share what this pattern takes, which is 280 MiB after 9,000 letters."""
    budget = MemoryBudget(
        WORKER_BYTES + index_bytes(runtime.codec, runtime.engine.capabilities.vocabulary) + (room << 20)
    )
    with make_runtime(budget=budget, context=64, sequences=1) as opened:
        first, second = (opened._grammars.compile("regex", "([ab]*a[ab]{30}){9}x") for _ in range(2))
        before, small = private_bytes_now(), budget.taken["formats"]
        with pytest.raises(LimitExceeded, match=f"regex: has grown by .* MiB while it was used, and {reason}"):
            _written(first, "ab", 9000)
        taken, grown = budget.taken["formats"] - small, private_bytes_now() - before
        # It is noticed after a table has been doubled, and what was refused is not taken.
        assert min(4, room // 4) << 20 < taken <= grown < 64 << 20
        first.close()
        assert budget.taken["formats"] == small + taken, "the other answer uses it too"
        second.close()
        assert budget.taken["formats"] < small, "freed with its last answer"
        assert private_bytes_now() - before < grown // 2, "though the error refers to it"
        assert opened._grammars.compile("regex", "([ab]*a[ab]{30}){9}x").compiled.grown_bytes == 0
        assert len(opened.generate("a", regex="[ab]{3}").text) == 3


def test_a_format_that_ran_into_its_limits_is_compiled_anew(runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies share the lexer, and with it the error that it has reached its limits."""
    monkeypatch.setattr(format_memory, "MAX_GROWN_BYTES", 1 << 30)
    monkeypatch.setattr(format_memory, "_RENEWED_BYTES", 1 << 30)
    pattern = "(.{0,400}a.{300}b){4}"
    first = runtime._grammars.compile("regex", pattern)
    with pytest.raises(LimitExceeded, match="ran past its limits: lexer error: too many"):
        _written(first, "ab", 9000)
    first.close()
    assert len(runtime.generate("a", regex=pattern, max_tokens=3).tokens) == 3


@contextmanager
def _grows_less_than(most: int) -> Iterator[None]:
    """Check how much this process grows in the block at most, where the OS says it."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        yield
        return
    reset.write_text("5")
    before = memory_sizes(status)["VmHWM"]
    yield
    assert memory_sizes(status)["VmHWM"] - before < most


def test_a_format_that_takes_too_much_memory_is_refused_before_it_grows_here(runtime) -> None:
    runtime.generate("a", regex="[ab]{3}")
    for count, reason in (
        (900, "took too much memory"),
        (230, "takes .* MiB compiled, and 64 MiB are allowed; make it"),
    ):
        with _grows_less_than(16 << 20), pytest.raises(LimitExceeded, match=reason):
            runtime.generate("a", regex=f"(a{{1000}}){{{count}}}")
    small = MemoryBudget(WORKER_BYTES + index_bytes(runtime.codec, runtime.engine.capabilities.vocabulary) + (1 << 20))
    no_room = pytest.raises(LimitExceeded, match=r"regex: takes more than .* to compile, and the memory budget has")
    with make_runtime(budget=small, context=64, sequences=1) as runtime, no_room:
        runtime.generate("a", regex="(a{1000}){30}")


@pytest.mark.parametrize("shape", [{"regex": r"[\s\S]{9,40}"}, {"regex": r"(ü|日|🙂|<\|end\|>)+x"}, {"schema": PERSON}])
def test_the_index_allows_what_one_made_from_the_tokenizers_text_allows(shape: dict[str, Any]) -> None:
    """For the bundled model, whose tokens are parts of characters too, along random answers."""
    import llguidance

    codec, chance = read_codec(open_source("demo").folder), random.Random(3)
    (kind, value), size = *shape.items(), codec.vocabulary + 24  # some models have more rows than tokens
    grammar = grammar_of(llguidance, kind, for_llguidance(kind, checked_text(kind, value)))
    made = index_of(llguidance, codec, size, [2])
    plain = llguidance.LLTokenizer(codec.tokenizer.to_str(), n_vocab=size, eos_token=[2])
    for _ in range(4):
        matchers = [llguidance.LLMatcher(each, grammar) for each in (made, plain)]
        for _ in range(40):
            mine, theirs = (np.frombuffer(each.compute_logit_bias(), np.uint8) for each in matchers)
            assert np.array_equal(mine, theirs) and mine.any()
            token = int(chance.choice(np.flatnonzero(mine)))
            assert all(each.consume_token(token) for each in matchers)
            if matchers[0].is_stopped():
                break


@pytest.mark.parametrize(("kind", "text"), [("regex", r"a[^\s\S]b"), ("grammar", "start: A\nA: /a/ & /b/")])
def test_a_format_that_nothing_matches_is_said_so(runtime, kind: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=f"{kind}: cannot be compiled: nothing can match it"):
        runtime.generate("a", **{kind: text}, max_tokens=5)


def test_a_boundary_in_a_grammar_is_refused_by_name(runtime) -> None:
    with pytest.raises(InvalidInput, match=r"a grammar cannot have \\b and \\B"):
        runtime.generate("a", grammar=r"start: /\bfoo/", max_tokens=5)


def test_formats_without_llguidance_are_refused_by_name(runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(TargetMissing, match=r"schema: needs llguidance; pip install 'edgekit\[structured\]'"):
        runtime.generate("a", schema={})
