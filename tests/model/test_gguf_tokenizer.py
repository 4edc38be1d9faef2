"""GGUF tokenizers as Hugging Face files, and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from time import process_time
from typing import Any

import gguf_files as files
import pytest
from gguf_files import ARRAY, BOOL, F32, I32, STRING, U32, Value
from tokenizers import Tokenizer

from edgekit.errors import InvalidInput, Unsupported
from edgekit.formats.gguf import GgufFile
from edgekit.model.gguf_splits import SPLITS
from edgekit.model.gguf_tokenizer import token_ids, tokenizer_files

BYTES = files.byte_level_tokenizer(320)
PIECES = files.sentence_piece_tokenizer(320)
KEY = "tokenizer.ggml."


def made(folder: Path, metadata: Mapping[str, Value | None]) -> dict[str, bytes]:
    """The files of a tokenizer; None leaves a key out."""
    path = folder / "model.gguf"
    kept = {key: value for key, value in metadata.items() if value is not None}
    path.write_bytes(files.gguf_bytes(kept, {}))
    with GgufFile.open(path) as file:
        return tokenizer_files(file.metadata, str(path))


def built(folder: Path, metadata: Mapping[str, Value | None]) -> Tokenizer:
    return Tokenizer.from_buffer(made(folder, metadata)["tokenizer.json"])


def tokens_of(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    found: list[str] = tokenizer.encode(text, **options).tokens
    return found


def test_byte_level_tokens_follow_the_merges(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, BYTES)
    assert tokens_of(tokenizer, "the the") == ["the", "Ġthe"]
    assert tokens_of(tokenizer, "in er") == ["in", "Ġ", "er"]
    assert tokens_of(tokenizer, "01 1") == ["0", "1", "Ġ", "1"], "single digits are never merged"
    assert tokens_of(tokenizer, "a<|im_end|><tool>b") == ["a", "<|im_end|>", "<tool>", "b"]
    text = "naïve 👋 the\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.decode([2, 3 + 256 + 8]) == "<tool>", "control tokens are special, user-defined ones are not"


def test_padding_tokens_are_no_added_tokens(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, BYTES)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 320
    assert len(tokens_of(tokenizer, "[PAD300]")) == 8
    assert {token.content for token in tokenizer.get_added_tokens_decoder().values()} == {
        "<|endoftext|>", "<s>", "<|im_end|>", "<tool>",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "in1234 the", ["in", "1", "2", "3", "4", "Ġthe"]),
        ("smollm", "in0101", ["in", "0", "1", "0", "1"]),
        ("gpt-2", "0101", ["01", "01"]),
        ("qwen2", "0101", ["0", "1", "0", "1"]),
        ("llama-bpe", "0101", ["01", "0", "1"]),
        ("smaug-bpe", "0101", ["01", "0", "1"]),
        ("gpt-4o", "0101", ["01", "0", "1"]),
        ("tekken", "0101", ["0", "1", "0", "1"]),
        ("gpt-2", "x/\n", ["x", "/", "Ċ"]),
    ],
)
def test_text_is_split_by_the_files_pre_tokenizer(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    tokenizer = built(tmp_path, BYTES | {f"{KEY}pre": Value(STRING, pre)})
    assert tokens_of(tokenizer, text, add_special_tokens=False) == expected


@pytest.mark.parametrize("pre", SPLITS)
def test_every_known_pre_tokenizer_works(tmp_path: Path, pre: str) -> None:
    tokenizer = built(tmp_path, BYTES | {f"{KEY}pre": Value(STRING, pre)})
    text = "Wir're 12345 the ÉTÉ… \n\n\tx  y"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_unicode_is_composed_if_the_family_does(tmp_path: Path) -> None:
    decomposed = "e\u0301"
    for pre, expected in (("qwen2", "é"), ("llama-bpe", decomposed)):
        tokenizer = built(tmp_path, BYTES | {f"{KEY}pre": Value(STRING, pre)})
        assert tokenizer.decode(tokenizer.encode(decomposed, add_special_tokens=False).ids) == expected


def test_bos_and_eos_follow_the_file_or_its_tokenizer_kind(tmp_path: Path) -> None:
    plain = {key: value for key, value in BYTES.items() if key != f"{KEY}add_bos_token"}
    assert tokens_of(built(tmp_path, plain), "in") == ["in"]
    llama = plain | {f"{KEY}pre": Value(STRING, "llama-bpe")}
    assert tokens_of(built(tmp_path, llama), "in") == ["<s>", "in"], "llama.cpp's default for this kind"
    told = llama | {f"{KEY}add_bos_token": Value(BOOL, False)}
    assert tokens_of(built(tmp_path, told), "in") == ["in"]
    ended = plain | {f"{KEY}add_eos_token": Value(BOOL, True)}
    assert tokens_of(built(tmp_path, ended), "in") == ["in", "<|im_end|>"]
    assert tokens_of(built(tmp_path, PIECES), "the")[0] == "<s>"
    with pytest.raises(InvalidInput, match="is to be added and has no id"):
        made(tmp_path, ended | {f"{KEY}eos_token_id": None})


def test_sentence_piece_merges_the_best_score_first(tmp_path: Path) -> None:
    tokenizer = built(tmp_path, PIECES)
    assert tokens_of(tokenizer, "the", add_special_tokens=False) == ["▁the"]
    # "▁th" (score -1) is better than "he" (-5), so it is made first and stays.
    assert tokens_of(tokenizer, "theth", add_special_tokens=False) == ["▁the", "th"]
    assert tokens_of(tokenizer, "ethe", add_special_tokens=False) == ["▁", "e", "the"]
    assert tokens_of(tokenizer, "é", add_special_tokens=False) == ["▁", "<0xC3>", "<0xA9>"]
    assert tokens_of(tokenizer, "<start_of_turn>in", add_special_tokens=False) == ["<start_of_turn>", "▁", "in"]
    text = "the rain in e"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    bare = built(tmp_path, files.sentence_piece_tokenizer(320, add_space=False))
    assert tokens_of(bare, "the the", add_special_tokens=False) == ["the", "▁the"]
    assert tokens_of(bare, "e    in", add_special_tokens=False) == ["e", "  ", "  ", "in"]


def test_phi_3_tokens_remove_spaces_after_them(tmp_path: Path) -> None:
    phi = PIECES | {"general.architecture": Value(STRING, "phi3")}
    text = "<start_of_turn>\n in"
    for metadata, rest in ((phi, ["▁", "in"]), (PIECES, ["▁", "<0x0A>", "▁", "in"])):
        tokenizer = built(tmp_path, metadata)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert [tokenizer.id_to_token(index) for index in ids] == ["<start_of_turn>", *rest]


def test_files_beside_the_tokenizer(tmp_path: Path) -> None:
    found = made(tmp_path, BYTES)
    assert found["chat_template.jinja"].decode() == BYTES["tokenizer.chat_template"].value
    config = json.loads(found["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<s>", "<|im_end|>", "<|endoftext|>")
    assert config["clean_up_tokenization_spaces"] is False
    assert "chat_template.jinja" not in made(tmp_path, PIECES)
    assert token_ids({f"{KEY}{key}": value for key, value in _read(tmp_path, BYTES).items()}, "x") == {
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip


def _read(folder: Path, metadata: Mapping[str, Value]) -> dict[str, Any]:
    path = folder / "model.gguf"
    path.write_bytes(files.gguf_bytes(metadata, {}))
    file = GgufFile.open(path)  # stays open: texts are read from it
    return {key.removeprefix(KEY): value for key, value in file.metadata.items() if key.startswith(KEY)}


def test_every_control_token_that_ends_a_text_is_listed(tmp_path: Path) -> None:
    assert json.loads(made(tmp_path, BYTES)["generation_config.json"])["eos_token_id"] == [2, 0]
    turned = BYTES | {f"{KEY}eot_token_id": Value(U32, 7), f"{KEY}eos_token_id": Value(U32, 1)}
    assert json.loads(made(tmp_path, turned)["generation_config.json"])["eos_token_id"] == [1, 7, 2, 0]
    plain = BYTES | {f"{KEY}token_type": Value(ARRAY, [1, 1, 3, *BYTES[f"{KEY}token_type"].value[3:]], I32)}
    ends = json.loads(made(tmp_path, plain)["generation_config.json"])["eos_token_id"]
    assert ends == [2], "<|endoftext|> is a plain text here"


def test_token_ids_outside_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    found = made(tmp_path, BYTES | {f"{KEY}padding_token_id": Value(U32, (1 << 32) - 1)})
    assert "pad_token" not in json.loads(found["tokenizer_config.json"])


def changed_tokens(index: int, token: str | bytes, metadata: Mapping[str, Value] = BYTES) -> dict[str, Value]:
    tokens = list(metadata[f"{KEY}tokens"].value)
    tokens[index] = token
    return {**metadata, f"{KEY}tokens": files.strings(*tokens)}


REFUSED: dict[str, tuple[dict[str, Value | None], str]] = {
    "another kind of tokenizer": (BYTES | {f"{KEY}model": Value(STRING, "bert")}, "'bert' is not supported"),
    "another way to split": (
        BYTES | {f"{KEY}pre": Value(STRING, "deepseek-llm")},
        "'deepseek-llm' is a way to split text that is not supported; supported: gpt-2, ",
    ),
    "no way to split": (BYTES | {f"{KEY}pre": None}, "pre: '' is a way to split text that is not supported"),
    "an unknown key": (BYTES | {f"{KEY}precompiled_charsmap": Value(STRING, "x")}, "is not known"),
    "a separator": (BYTES | {f"{KEY}add_sep_token": Value(BOOL, True)}, "add_sep_token is true"),
    "spaces removed": (PIECES | {f"{KEY}remove_extra_whitespaces": Value(BOOL, True)}, "whitespaces is true"),
    "a prefix before bytes": (BYTES | {f"{KEY}add_space_prefix": Value(BOOL, True)}, "add_space_prefix is true"),
    "an unknown kind of token": (
        BYTES | {f"{KEY}token_type": Value(ARRAY, [9] * 320, I32)},
        "token_type: 9 is not a known type",
    ),
}
WRONG: dict[str, tuple[dict[str, Value | None], str]] = {
    "no tokens": (BYTES | {f"{KEY}tokens": None}, "tokens: None is not a list"),
    "tokens that are numbers": (BYTES | {f"{KEY}tokens": Value(ARRAY, [1, 2], I32)}, "is not a list of 1 to"),
    "an empty list": (BYTES | {f"{KEY}tokens": files.strings()}, "is not a list of 1 to"),
    "a token twice": (changed_tokens(310, "the"), "the token 'the' occurs twice"),
    "a token that is no UTF-8": (changed_tokens(310, b"\xff"), "token 310, b'\\\\xff', is not UTF-8"),
    "too few kinds": (BYTES | {f"{KEY}token_type": Value(ARRAY, [1], I32)}, "one number for each of 320"),
    "no scores": (PIECES | {f"{KEY}scores": None}, "scores: None is missing"),
    "no merges": (BYTES | {f"{KEY}merges": None}, "merges: None is not a list of texts"),
    "a merge into nothing": (BYTES | {f"{KEY}merges": files.strings("t h", "q q")}, "merge 1, b'q q', is not of two"),
    "a merge of one": (BYTES | {f"{KEY}merges": files.strings("the")}, "merge 0, b'the', is not of two"),
    "an id that is a text": (BYTES | {f"{KEY}bos_token_id": Value(STRING, "1")}, "'1' is not a token's id"),
    "a flag that is a number": (BYTES | {f"{KEY}add_bos_token": Value(U32, 1)}, "1 is neither true nor false"),
    "a template that is a number": (BYTES | {"tokenizer.chat_template": Value(U32, 1)}, "1 is not a text"),
    "bytes that are missing": (
        changed_tokens(BYTES[f"{KEY}tokens"].value.index("q"), "[PAD]"),
        "a text comes back as .* after encoding",
    ),
}  # fmt: skip


def with_tokens(tokens: list[str], kind: int) -> dict[str, Value | None]:
    """The SentencePiece tokenizer with more tokens of a kind."""
    old = PIECES[f"{KEY}tokens"].value
    count = len(old) + len(tokens)
    return PIECES | {
        f"{KEY}tokens": files.strings(*old, *tokens),
        f"{KEY}token_type": Value(ARRAY, [*PIECES[f"{KEY}token_type"].value, *[kind] * len(tokens)], I32),
        f"{KEY}scores": Value(ARRAY, [0.0] * count, F32),
    }


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (with_tokens(["x" * 4000 + str(index) for index in range(20)], 1), "too many long tokens"),
        (with_tokens(["x" * 4000 + str(index) for index in range(300)], 4), "too many tokens as control"),
        (with_tokens([f"x{index}" for index in range(70_000)], 3), "too many tokens as control"),
    ],
)
def test_a_vocabulary_made_to_take_hours_is_refused_at_once(
    tmp_path: Path, metadata: Mapping[str, Value | None], message: str
) -> None:
    began = process_time()
    with pytest.raises(InvalidInput, match=message):
        made(tmp_path, metadata)
    assert process_time() - began < 1


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_changes_the_tokenizer_is_refused_by_name(tmp_path: Path, case: str) -> None:
    metadata, message = REFUSED[case]
    with pytest.raises(Unsupported, match=message):
        made(tmp_path, metadata)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused_with_key_and_value(tmp_path: Path, case: str) -> None:
    metadata, message = WRONG[case]
    with pytest.raises(InvalidInput, match=message):
        made(tmp_path, metadata)
