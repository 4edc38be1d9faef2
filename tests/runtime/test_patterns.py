r"""\d, \w and \s have the meaning of ECMA-262, alone, in classes and in schemas; compared with Python's re."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from edgekit.errors import InvalidInput
from edgekit.runtime.generation.grammar_worker import grammar_of
from edgekit.runtime.generation.patterns import as_ecma, schema_as_ecma
from edgekit.runtime.generation.structured import checked_text, for_llguidance

llguidance = pytest.importorskip("llguidance")

BLANKS = "\t\n\v\f\r \u00a0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000\ufeff"
# One of each kind that the two dialects could disagree on.
CHARACTERS = "ab0_9Z- \\]^.é٣\U000116dbſK\u00a0\u0085\ufeff\u2028\n\u180e🙂"


class Bytes:
    """A vocabulary of the 256 bytes and an end."""

    def __init__(self) -> None:
        self.tokens = [*(bytes([value]) for value in range(256)), b"<end>"]
        self.special_token_ids = [256]
        self.eos_token_id, self.bos_token_id = 256, None

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def matcher(kind: str, shape: Any) -> Any:
    """The shape as the runtime compiles it."""
    found = llguidance.LLMatcher(
        TOKENIZER, grammar_of(llguidance, kind, for_llguidance(kind, checked_text(kind, shape)))
    )
    assert not found.is_error(), found.get_error()
    return found


def accepts(compiled: Any, text: str) -> bool:
    state = compiled.deep_copy()
    return state.validate_tokens(list(text.encode())) == len(text.encode()) and bool(
        state.consume_tokens(list(text.encode())) and state.is_accepting()
    )


def written(compiled: Any, seed: int) -> str | None:
    """A text drawn byte by byte; None where it does not come to its end."""
    state, chosen, drawn = compiled.deep_copy(), random.Random(seed), bytearray()
    while len(drawn) < 200:
        if state.is_accepting() and (state.is_stopped() or chosen.random() < 0.3):
            return drawn.decode()
        allowed = [token for token, bias in enumerate(state.compute_logit_bias()[:256]) if bias]
        drawn.append(chosen.choice(allowed))
        assert state.consume_token(drawn[-1])
    return None


# A pattern in two dialects: ours, and Python's with its ASCII flag, where the blanks of ECMA-262 are written out.
Pair = tuple[str, str]
SAME = [(text, text) for text in ("a", "b", "0", "_", "é", " ", r"\\", r"\.", r"\-", r"\d", r"\D", r"\w", r"\W")]
OUTSIDE: list[Pair] = [*SAME, (r"\s", f"[{BLANKS}]"), (r"\S", f"[^{BLANKS}]"), (r"\\d", r"\\d"), (".", ".")]
MEMBERS: list[Pair] = [*SAME, (r"\s", BLANKS), (r"\]", r"\]"), (r"\^", r"\^"), ("0-5", "0-5"), (r"\[", r"\[")]


def joined(parts: list[Pair], form: str = "{}", between: str = "") -> Pair:
    ours, theirs = (form.format(between.join(side)) for side in zip(*parts, strict=True))
    return ours, theirs


classes = st.tuples(st.lists(st.sampled_from(MEMBERS), min_size=1, max_size=4), st.sampled_from(["[{}]", "[^{}]"]))


def has_members(pair: Pair) -> bool:
    return any(re.fullmatch(pair[1], character, re.ASCII) for character in CHARACTERS)


atoms = st.sampled_from(OUTSIDE) | classes.map(lambda drawn: joined(*drawn)).filter(has_members)
patterns = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map(joined)
        | st.lists(inner, min_size=2, max_size=3).map(lambda parts: joined(parts, "(?:{})", "|"))
        | st.tuples(inner, st.sampled_from(["(?:{}){{2}}", "(?:{})?", "(?:{}){{1,3}}", "({})"])).map(
            lambda drawn: joined([drawn[0]], drawn[1])
        )
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=300)
@given(pair=patterns, seed=st.integers(0, 2**32), data=st.data())
def test_a_pattern_accepts_and_writes_what_python_matches(pair: Pair, seed: int, data: st.DataObject) -> None:
    ours, theirs = pair
    right, compiled = re.compile(theirs, re.ASCII), matcher("regex", ours)
    for draw in range(3):
        text = written(compiled, seed + draw)
        assert text is None or right.fullmatch(text), (ours, text)
    tried = data.draw(st.lists(st.text(CHARACTERS, max_size=4), max_size=8))
    for text in [*tried, *CHARACTERS]:
        assert accepts(compiled, text) == bool(right.fullmatch(text)), (ours, text)


@settings(deadline=None, max_examples=150)
@given(pair=patterns, data=st.data())
def test_texts_that_python_matches_are_accepted(pair: Pair, data: st.DataObject) -> None:
    ours, theirs = pair
    text = data.draw(st.from_regex(re.compile(theirs, re.ASCII), fullmatch=True, alphabet=st.characters(codec="utf-8")))
    assert accepts(matcher("regex", ours), text)


@settings(deadline=None, max_examples=150)
@given(pair=patterns, tried=st.lists(st.text(CHARACTERS, max_size=3), max_size=6))
def test_a_pattern_in_a_schema_means_the_same(pair: Pair, tried: list[str]) -> None:
    ours, theirs = pair
    compiled = matcher("schema", {"type": "string", "pattern": f"^(?:{ours})$"})
    right = re.compile(theirs, re.ASCII)
    # llguidance lets a class that leaves out a backslash write one as an escape.
    for text in [text for text in [*tried, *CHARACTERS] if "\\" not in text]:
        assert accepts(compiled, json.dumps(text, ensure_ascii=False)) == bool(right.fullmatch(text)), (ours, text)


EXPECTED = {
    r"\d{2}": "[0-9]{2}",
    r"\\d\\\d": r"\\d\\[0-9]",
    r"[^\W_]": "[^[^0-9A-Za-z_]_]",
    r"[a-\d]": r"[a\-[0-9]]",
    r"[-\d]": r"[\-[0-9]]",
    r"[\w--\d]": "[[0-9A-Za-z_]--[0-9]]",
    r"[]\d]\d": "[][0-9]][0-9]",
    r"[^]\d]\d": "[^][0-9]][0-9]",
    r"[b[\d]c]\d": "[b[[0-9]]c][0-9]",
    r"[[:alpha:]\d](\d)": "[[:alpha:][0-9]]([0-9])",
    r"\[\d\]": r"\[[0-9]\]",
    r"[(?u:]\d": "[(?u:][0-9]",
    r"(?u:\d)\d": r"(?u:[\p{Nd}])[0-9]",
    r"((?u)\d)\d": r"((?u)[\p{Nd}])[0-9]",
    r"(?-u:\d(?u:\d))(?i:\d)": r"(?-u:\d(?u:[\p{Nd}]))(?i:[0-9])",
    r"(?P<one>\d)(?<two>\d)": "(?P<one>[0-9])(?<two>[0-9])",
    "(?x)# [ \\d\n[a - \\d]": "(?x)# [ \\d\n[a \\- [0-9]]",
    r"\cJ\0[\b]\p{Nd}": r"\x0A\x00[\x08]\p{Nd}",
    "no escapes [at-all] (here)+ é": "no escapes [at-all] (here)+ é",
    "\\": "\\",
    ")": ")",
    "[": "[",
}


@pytest.mark.parametrize(("pattern", "right"), EXPECTED.items(), ids=EXPECTED)
def test_escapes_alone_are_written_out(pattern: str, right: str) -> None:
    assert as_ecma(pattern) == right


@given(st.text("\\dDwWsSbc0[](?u:-)x^&#é \n", max_size=30))
def test_any_text_is_read_to_its_end(pattern: str) -> None:
    try:
        found = as_ecma(pattern)
    except InvalidInput:
        assert r"\b" in pattern or r"\B" in pattern
    else:
        assert found == pattern or "\\" in pattern


UNICODE = {
    r"(?u:\d)": ("٣", "x"),
    r"\p{Nd}": ("٣", "x"),
    r"(?u:\w)": ("é", "-"),
    r"(?u:\s)": ("\u0085", "\ufeff"),
    r"(?u:\D)": ("x", "٣"),
    r"(?u:[^\w])": ("-", "é"),
}


@pytest.mark.parametrize(("pattern", "texts"), UNICODE.items(), ids=UNICODE)
def test_unicode_classes_can_be_asked_for(pattern: str, texts: tuple[str, str]) -> None:
    for compiled, form in (
        (matcher("regex", pattern), str),
        (
            matcher("schema", {"type": "string", "pattern": f"^{pattern}$"}),
            lambda text: json.dumps(text, ensure_ascii=False),
        ),
    ):
        assert [accepts(compiled, form(text)) for text in texts] == [True, False]


@pytest.mark.parametrize("pattern", [r"\bx", r"x\B", r"(?:a|\b)", r"^\w+\b$"])
def test_word_boundaries_are_refused_by_name(pattern: str) -> None:
    for shape in (lambda: as_ecma(pattern), lambda: schema_as_ecma({"patternProperties": {pattern: {}}})):
        with pytest.raises(InvalidInput, match=r"word boundaries \(\\[bB]\) are not offered"):
            shape()
    assert as_ecma(r"[\b]\\b") == r"[\x08]\\b"  # a backspace, and a backslash before a letter


def test_only_patterns_of_a_schema_are_rewritten() -> None:
    schema = {
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "pattern": r"\d", "default": {"pattern": r"\d"}},
            "kind": {"enum": [{"pattern": r"\d"}], "const": {"pattern": r"\d"}},
            r"\d": {"anyOf": [{"pattern": r"\s?\d"}, {"$ref": "#/$defs/x"}]},
        },
        "patternProperties": {r"^\w+$": {"items": {"pattern": r"\w"}}},
        "$defs": {"x": {"pattern": r"\D"}, "pattern": {"pattern": "a"}},
        "parts": {"of": {"pattern": r"\d"}},
    }
    right = json.loads(json.dumps(schema))
    right["properties"]["pattern"]["pattern"] = "[0-9]"
    right["properties"][r"\d"]["anyOf"][0]["pattern"] = as_ecma(r"\s?\d")
    right["patternProperties"] = {"^[0-9A-Za-z_]+$": {"items": {"pattern": "[0-9A-Za-z_]"}}}
    right["$defs"]["x"]["pattern"] = "[^0-9]"
    right["parts"]["of"]["pattern"] = "[0-9]"
    assert schema_as_ecma(schema) == right
    with pytest.raises(InvalidInput, match="two patterns mean the same"):
        schema_as_ecma({"patternProperties": {r"\d": {}, "[0-9]": {}}})


def test_names_of_pattern_properties_are_ascii_too() -> None:
    schema = {"patternProperties": {r"^\d\s$": {"type": "integer"}}, "additionalProperties": False, "type": "object"}
    compiled = matcher("schema", schema)
    for name, right in {"3 ": True, "٣ ": False, "3\ufeff": True, "3\u0085": False}.items():
        assert accepts(compiled, json.dumps({name: 1}, ensure_ascii=False)) is right


FORMATS = {
    "date": "2024-02-29",
    "time": "12:30:00Z",
    "date-time": "2024-02-29T12:30:00Z",
    "duration": "P3D",
    "email": "a1@example.org",
    "hostname": "a1.example.org",
    "ipv4": "127.0.0.1",
    "ipv6": "2001:db8::1",
    "uuid": "12345678-1234-1234-1234-123456789abc",
    "uri": "http://example.org:80/a1",
}


@pytest.mark.parametrize(("name", "text"), FORMATS.items(), ids=FORMATS)
def test_formats_take_ascii_digits_alone(name: str, text: str) -> None:
    compiled = matcher("schema", {"type": "string", "format": name})
    assert accepts(compiled, json.dumps(text))
    for place, character in enumerate(text):
        if character.isdigit():
            other = text[:place] + "٣" + text[place + 1 :]
            assert not accepts(compiled, json.dumps(other, ensure_ascii=False))
