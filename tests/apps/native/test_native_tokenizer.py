"""The native tokenizer gives the tokens and texts of the `tokenizers` library, or refuses by name."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runtimes
from native_tokenizers import MADE
from tokenizers import AddedToken, Tokenizer, normalizers
from unicode_classes import TABLE, classes, members
from unicode_normal_form import TABLE as TABLE_OF_FORMS, combining_classes, decompositions, table as table_of_forms
from varied_texts import varied_texts

from edgekit.apps.native.library import NativeLibrary
from edgekit.errors import InvalidInput

pytestmark = pytest.mark.slow  # the library is compiled
DEMO = Path(__file__).parents[3] / "examples/training/demo/target/tokenizer.json"


def compare(library: NativeLibrary, vendor: Tokenizer, count: int, seed: int = 0) -> None:
    """Compare tokens of texts, and texts of tokens: those of the texts and random ones, which tear characters."""
    vendor.no_padding()
    vendor.no_truncation()
    native = library.read_tokenizer(vendor.to_str().encode())
    draw, size = random.Random(seed), vendor.get_vocab_size()
    special = [token.content for token in vendor.get_added_tokens_decoder().values()]
    for text in varied_texts(count, seed, special):
        for adds in (True, False):
            tokens = vendor.encode(text, add_special_tokens=adds).ids
            assert native.encode(text, add_special_tokens=adds) == tokens, (text, adds)
        torn = [draw.randrange(size + 5) for _ in range(draw.randrange(12))]
        for ids in (tokens, torn):
            for skips in (True, False):
                expected = vendor.decode(ids, skip_special_tokens=skips)
                assert native.decode(ids, skip_special=skips) == expected, (ids, skips)
    native.close()


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_the_demo_tokenizer_gives_the_same_tokens_and_texts(library: NativeLibrary, count: int) -> None:
    compare(library, Tokenizer.from_file(str(DEMO)), count)


@pytest.mark.parametrize("count", [150, pytest.param(3_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MADE)
def test_a_made_tokenizer_gives_the_same_tokens_and_texts(library: NativeLibrary, name: str, count: int) -> None:
    compare(library, MADE[name](), count, seed=1)


def test_added_tokens_that_overlap_are_found_as_by_the_tokenizers_library(library: NativeLibrary) -> None:
    draw = random.Random(7)
    for seed in range(60):
        vendor = runtimes.byte_level()
        for text in sorted({"".join(draw.choices("abé", k=draw.randrange(1, 7))) for _ in range(12)}):
            left, right, normalized = draw.choices((True, False), k=3)
            vendor.add_tokens([AddedToken(text, lstrip=left, rstrip=right, normalized=normalized)])
        compare(library, vendor, 30, seed)


@pytest.mark.parametrize("text", ["a", " "])
def test_hostile_added_tokens_take_no_more_time_than_sound_ones(library: NativeLibrary, text: str) -> None:
    """Comparisons at each place would take hundreds of times as long."""
    hostile = {"a": ["a" * size + "\x01" for size in range(1, 1023)], " ": [" "]}

    def seconds(added: list[str]) -> float:
        vendor = runtimes.byte_level()
        vendor.add_tokens([AddedToken(each, lstrip=True, normalized=False) for each in added])
        native, began = library.read_tokenizer(vendor.to_str().encode()), time.process_time()
        native.encode(text * 40_000)
        return time.process_time() - began

    assert seconds(hostile[text]) < 10 * seconds([])


def test_the_table_of_unicode_classes_is_that_of_the_tokenizers_library() -> None:
    """Each end of a range, and what is next to it; `tests/helpers/unicode_classes.py` writes the table anew."""
    tables = TABLE.read_text().split("const CodePoints ")[1:]
    assert [table.split(" ")[0] for table in tables] == list(classes())
    for table, splitter in zip(tables, classes().values(), strict=True):
        pairs = [pair.split("{")[-1].split(", ") for pair in table.split("}")[:-2] if ", 0x" in pair]
        ranges = [(int(first, 16), int(last, 16)) for first, last in pairs]
        assert len(ranges) > 5
        expected = {point for pair in ranges for point in pair}
        around = {point + step for pair in ranges for point, step in zip(pair, (-1, 1), strict=True)}
        points = sorted(point for point in expected | around if 0 <= point < 0x110000 and not 0xD800 <= point <= 0xDFFF)
        assert set(members(splitter, points)) == expected


def test_letters_and_marks_are_composed_as_by_the_tokenizers_library(library: NativeLibrary) -> None:
    """Every code point that has a decomposition or a class, syllables of Hangul, and texts of many marks."""
    vendor = runtimes.byte_level()
    vendor.normalizer = normalizers.NFC()
    native, compose = library.read_tokenizer(vendor.to_str().encode()), normalizers.NFC().normalize_str
    draw, decomposed = random.Random(0), decompositions()
    parts = sorted({part for each in decomposed.values() for part in each})
    marks = sorted(combining_classes())
    points = [*decomposed, *marks, *range(0xAC00, 0xD7A4, 97), *range(0x1100, 0x1200), *parts]
    texts = ["".join(map(chr, points[start : start + 50])) for start in range(0, len(points), 50)]
    for _ in range(3000):
        texts.append(
            "".join(chr(draw.choice(draw.choice((parts, marks, points)))) for _ in range(draw.randrange(2, 9)))
        )
    for text in texts:
        assert native.decode(native.encode(text), skip_special=False) == compose(text), ascii(text)
    native.close()


def test_the_tables_of_composition_are_those_of_the_tokenizers_library() -> None:
    assert TABLE_OF_FORMS.read_text() == table_of_forms()


def damaged(change: Callable[[dict[str, Any]], None]) -> bytes:
    described = json.loads(runtimes.byte_level().to_str())
    change(described)
    return json.dumps(described).encode()


def long_tokens(first: int) -> list[dict[str, Any]]:
    return [{"id": place, "content": f"{place:01000}"} for place in range(first, first + 1100)]


def template_of(special: str) -> dict[str, Any]:
    """A template of a special token that it does not describe."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": special, "type_id": 0}}],
        "special_tokens": {},
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda each: each.update(normalizer=json.loads(normalizers.NFKC().__getstate__())), "the normalizer 'NFKC'"),
        (lambda each: each.update(pre_tokenizer={"type": "Whitespace"}), "the pre-tokenizer 'Whitespace'"),
        (lambda each: each.update(decoder={"type": "CTC"}), "the decoder 'CTC'"),
        (lambda each: each.update(decoder=None), "no decoder"),
        (lambda each: each.update(post_processor={"type": "BertProcessing"}), "the post-processor 'BertProcessing'"),
        (lambda each: each["model"].update(type="Unigram"), "a model of type 'Unigram'"),
        (lambda each: each["model"].update(dropout=0.1), "a model with dropout"),
        (lambda each: each["model"]["merges"].append(["x", "unheard"]), "the token 'unheard', which is missing"),
        (lambda each: each["model"]["vocab"].update(twice=5), "have the same id"),
        (lambda each: each["added_tokens"][-1].update(single_word=True), "with single_word"),
        (lambda each: each["added_tokens"][-1].update(id=3), "has the id 3"),
        (lambda each: each.update(added_tokens=long_tokens(len(each["model"]["vocab"]))), "have too many bytes"),
        (lambda each: each.update(post_processor=template_of("\nx")), "^ x: is missing$"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    library: NativeLibrary, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason) as caught:
        library.read_tokenizer(damaged(change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pattern", [r"(a|b)+", r"a*?", r"\p{Lu}", r".", r"(?<=a)b", r"[a&&b]", r"a*", r"(", r"x{9,1}"])
def test_a_pattern_beyond_the_supported_ones_is_refused(library: NativeLibrary, pattern: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    with pytest.raises(InvalidInput, match="of a pre-tokenizer cannot be used"):
        library.read_tokenizer(damaged(lambda each: each.update(pre_tokenizer=split)))


def test_a_pattern_that_takes_too_long_is_stopped(library: NativeLibrary) -> None:
    split = {"type": "Split", "pattern": {"Regex": r"a+a+a+a+a+b"}, "behavior": "Isolated", "invert": False}
    tokenizer = library.read_tokenizer(damaged(lambda each: each.update(pre_tokenizer=split)))
    with pytest.raises(InvalidInput, match="takes too long"):
        tokenizer.encode("a" * 4000)
    tokenizer.close()


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"{}", b'{"model": {}}', b'{"a": 1, "a": 2}', b"\xff", b"[" * 99])
def test_what_is_no_tokenizer_is_refused_in_one_line(library: NativeLibrary, data: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        library.read_tokenizer(data)
    assert "\n" not in str(caught.value) and str(caught.value)


def test_broken_utf8_is_refused_with_its_place(library: NativeLibrary) -> None:
    tokenizer = library.read_tokenizer(DEMO.read_bytes())
    for text, place in (
        (b"ab\xff", 2),
        (b"\xed\xa0\x80", 0),
        (b"a\xc3", 1),
        (b"\xf4\x90\x80\x80", 0),
        (b"\xc0\x80", 0),
    ):
        with pytest.raises(InvalidInput, match=f"is not UTF-8 at byte {place}"):
            tokenizer.encode(text)
    assert tokenizer.encode(b"") == []
    tokenizer.close()
