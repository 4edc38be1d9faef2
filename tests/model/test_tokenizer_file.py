"""Hostile tokenizers are refused before they end the process or fill the memory."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from edgekit.errors import InvalidInput
from edgekit.model.source import DEMO_ARTIFACT
from edgekit.model.tokenizer_file import load_tokenizer, read_tokenizer
from examples.benchmarks.process_memory import used_bytes

WORDS = {"a": 0, "##b": 1, "##c": 2, "a\u6f22b": 3, "a##b": 4, "ab": 5, "\u6f22": 6, "a\u6f22": 7}


def tokenizer(prefix: object, merges: list[Any], kind: str = "BPE", **stages: Any) -> dict[str, Any]:
    model: dict[str, Any] = {"type": kind, "vocab": WORDS, "merges": merges, "continuing_subword_prefix": prefix}
    if kind == "WordPiece":
        model = {**model, "unk_token": "a", "max_input_chars_per_word": 100}
        del model["merges"]
    return {"version": "1.0", "added_tokens": [], "model": model, **stages}


def load(value: dict[str, Any]) -> Any:
    return load_tokenizer(json.dumps(value).encode(), "x/tokenizer.json")


@pytest.mark.parametrize("merge", ["a \u6f22", ["a", "\u6f22"]], ids=["string", "list"])
def test_a_merge_without_the_prefix_is_refused(merge: Any) -> None:
    # The library cuts one byte off the right part, which leaves half a character: it ends the process.
    with pytest.raises(InvalidInput, match=r"^x/tokenizer.json: .*merge .*does not begin with '1'") as caught:
        load(tokenizer("1", [merge]))
    assert "\n" not in str(caught.value)


def test_escapes_and_doubled_fields_hide_no_prefix() -> None:
    text = json.dumps(tokenizer("1", ["a \u6f22"]))
    for hidden in (
        text.replace("continuing", "\\u0063ontinuing"),
        text.replace('"continuing_subword_prefix": "1"', '"continuing_subword_prefix": "1", "merges": []'),
        text.replace('"continuing_subword_prefix": "1"', '"continuing_subword_prefix": "1", "\\u0074ype": "BPE"'),
    ):
        assert hidden != text
        with pytest.raises(InvalidInput, match="not a tokenizer"):
            load_tokenizer(hidden.encode(), "x/tokenizer.json")


def test_sound_prefixes_load() -> None:
    assert load(tokenizer("##", ["a ##b"])).encode("ab").ids == [5]
    assert load(tokenizer("##", [], "WordPiece")).encode("ab").ids
    for none in ("", None):
        assert load(tokenizer(none, ["a \u6f22"])).encode("a\u6f22").ids == [7]


GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([GROWING] * 40, "1.1e\\+12 times as long"),
        ([{**GROWING, "pattern": {"Regex": ""}, "content": "a" * 300}], "301 times as long"),
        ([{"type": "Prepend", "prepend": "a" * 5_000_000}], "5e\\+06 times as long"),
        ([{"type": "Sequence", "normalizers": [{"type": "NFC"}] * 40}] * 2, "80 steps"),
    ],
    ids=["doubled forty times", "text between characters", "a long text before", "nested"],
)
def test_stages_that_lengthen_a_text_without_bound_are_refused(steps: list[Any], said: str) -> None:
    value = tokenizer(None, [], normalizer={"type": "Sequence", "normalizers": steps})
    with pytest.raises(InvalidInput, match=said):
        load(value)


def test_pre_tokenizers_and_decoders_are_bounded_too() -> None:
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    for stage, key, steps in (
        ("pre_tokenizer", "pretokenizers", [bytes_] * 12),
        ("decoder", "decoders", [GROWING] * 12),
    ):
        with pytest.raises(InvalidInput, match="times as long"):
            load(tokenizer(None, [], **{stage: {"type": "Sequence", key: steps}}))


def test_a_template_with_an_unknown_token_is_refused() -> None:
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": []}
    with pytest.raises(InvalidInput, match="its template names '<s>', which it lacks"):
        load(tokenizer(None, [], post_processor={**template, "special_tokens": {}}))


def test_the_bundled_tokenizer_loads() -> None:
    path = DEMO_ARTIFACT / "tokenizer.json"
    assert read_tokenizer(path).encode("def f(x):").ids


@pytest.mark.skipif(sys.platform != "linux", reason="reads the counts of glibc")
def test_a_dropped_tokenizer_leaves_no_words_behind() -> None:
    """The library would keep 10,000 words in each thread that encodes: 350 KB for each of these tokenizers."""
    data = (DEMO_ARTIFACT / "tokenizer.json").read_bytes()

    def encode(number: int) -> None:
        tokenizer = load_tokenizer(data, "the demo's")
        assert tokenizer.encode(" ".join(f"word{number}x{place}" for place in range(2000))).ids

    for number in range(3):
        encode(number)
    before = used_bytes()
    for number in range(3, 13):
        encode(number)
    after = used_bytes()
    assert before is not None and after is not None and after - before < 500_000, after - before
