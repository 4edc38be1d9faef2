"""The tokenizer of a model as metadata of its GGUF file, so that other programs can open the file too.

The metadata is converted back by edgekit's GGUF reader and must encode a test text to the same tokens; otherwise none
is written. edgekit itself does not need it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgekit.common.parsing import read_json
from edgekit.errors import EdgekitError
from edgekit.formats.gguf_writer import MetadataValue
from edgekit.model.gguf_splits import SPLITS
from edgekit.model.gguf_tokenizer import tokenizer_files
from edgekit.model.spec import ModelSpec
from edgekit.model.tokenizer_file import load_tokenizer

NONE: dict[str, MetadataValue] = {"tokenizer.ggml.model": "none"}
_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NEVER_MERGED = -1e6  # below the score of every merge
_MAX_TOKENIZER_BYTES = 64 << 20
# Distinguishes pre-tokenizers by digits, contractions, case, marks, runs of spaces and punctuation, and line ends.
TEXT = (
    "I'LL we've DON'T 1 12 123 1234 12345678 3.14e-10 x86_64 camelCase HTTPServer iPhones /usr/local//lib\r\n\r\n\n"
    "   indented\n\tif (x != y) { return a[i++] / b; }  // trailing  \n\n\n#!$%^&*()_+-=  \u00a0\u3000 e\u0301 \u00e9 "
    "Zażółć gęślą jaźń Привет, МИР! 你好，世界。 こんにちは 안녕하세요 مرحبا 👋🏽 ∑∫√ ½ ² Ⅷ ١٢٣ hello/world/\n/"
)


def tokenizer_metadata(model: ModelSpec, folder: Path) -> dict[str, MetadataValue]:
    """Return the metadata of the tokenizer in `folder`, or `NONE` if llama.cpp has no equal one."""
    path = folder / "tokenizer.json"
    if not path.is_file() or path.stat().st_size > _MAX_TOKENIZER_BYTES:
        return NONE
    data = path.read_bytes()
    try:
        described, original = json.loads(data), load_tokenizer(data, str(path))
    except (ValueError, EdgekitError):  # such a model runs without a tokenizer in its file
        return NONE
    if described.get("model", {}).get("type") != "BPE":
        return NONE
    settings = _settings(folder)
    if described["model"].get("byte_fallback"):
        found: Mapping[str, MetadataValue] | None = _sentence_piece(described, original)
    else:
        found = _byte_level(described, original)
    common = _common(model, described, original, settings)
    if found is None or common is None:
        return NONE
    metadata = {f"{_KEY}{name}": value for name, value in {**found, **common}.items()}
    if not _is_same(metadata, original):
        return NONE
    template = _template(folder, settings)
    return metadata | ({} if template is None else {"tokenizer.chat_template": template})


def stop_texts(metadata: Mapping[str, MetadataValue]) -> list[str]:
    """Return the texts of the tokens that end an answer."""
    tokens = metadata[f"{_KEY}tokens"]
    assert isinstance(tokens, Sequence)
    ids = [metadata.get(f"{_KEY}{name}") for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    return [str(tokens[index]) for index in ids if isinstance(index, int)]


def _settings(folder: Path) -> dict[str, Any]:
    """Return `tokenizer_config.json` and, over it, `generation_config.json`."""
    settings: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            settings |= read_json(folder / name)
    return settings


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    text = path.read_text() if path.is_file() else settings.get("chat_template")
    return text if isinstance(text, str) else None


def _common(
    model: ModelSpec, described: Mapping[str, Any], original: Any, settings: Mapping[str, Any]
) -> dict[str, MetadataValue] | None:
    """Return tokens, their types and the special ids; None if there are more tokens than embedding rows."""
    ids: dict[str, int] = original.get_vocab(with_added_tokens=True)
    if not ids or max(ids.values()) >= model.vocab_size:
        return None
    tokens = [f"[PAD{index}]" for index in range(model.vocab_size)]
    kinds = np.full(model.vocab_size, _UNUSED, np.int32)
    falls_back = bool(described["model"].get("byte_fallback"))
    for token, index in ids.items():
        is_byte = falls_back and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        tokens[index], kinds[index] = token, _BYTE if is_byte else _NORMAL
    for added in described.get("added_tokens") or ():
        kinds[added["id"]] = _CONTROL if added.get("special") else _USER
    unknown = ids.get(described["model"].get("unk_token") or "")
    if falls_back and unknown is not None:
        kinds[unknown] = _UNKNOWN
    ends = _ends(model, ids, settings)
    plain, framed = (original.encode("a", add_special_tokens=special).ids for special in (False, True))
    bos = framed[0] if framed[: len(plain)] != plain else _id(ids, settings.get("bos_token"), model.bos_id)
    special = {
        "bos_token_id": bos,
        "unknown_token_id": unknown,
        "padding_token_id": _id(ids, settings.get("pad_token")),
    }
    special |= dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), ends, strict=False))
    common: dict[str, MetadataValue] = {"tokens": tokens, "token_type": kinds}
    common |= {name: index for name, index in special.items() if index is not None}
    common["add_bos_token"] = framed[: len(plain)] != plain
    common["add_eos_token"] = len(framed) > len(plain) + int(framed[: len(plain)] != plain)
    common["add_space_prefix"] = falls_back and bool(plain) and tokens[plain[0]].startswith("▁")
    return common


def _ends(model: ModelSpec, ids: Mapping[str, int], settings: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a text, the tokenizer's own first."""
    listed = settings.get("eos_token_id", list(model.eos_ids))
    listed = listed if isinstance(listed, list) else [listed]
    named = _id(ids, settings.get("eos_token"))
    ends = ([] if named is None else [named]) + [each for each in listed if type(each) is int]
    return [each for each in dict.fromkeys(ends) if 0 <= each < model.vocab_size]


def _id(ids: Mapping[str, int], token: Any, otherwise: int | None = None) -> int | None:
    """Return the id of a token that `tokenizer_config.json` names by its text, or by an object with the text."""
    text = token.get("content") if isinstance(token, dict) else token
    return ids.get(text, otherwise) if isinstance(text, str) else otherwise


def _byte_level(described: Mapping[str, Any], original: Any) -> dict[str, MetadataValue] | None:
    """Return the metadata of byte-level BPE; None if no known pre-tokenizer splits the test text in the same way."""
    pieces = _pieces(original)
    for name in SPLITS:
        if SPLITS[name].ignore_merges == bool(described["model"].get("ignore_merges")) and _splits_of(name) == pieces:
            merges = [each if isinstance(each, str) else " ".join(each) for each in described["model"]["merges"]]
            return {"model": "gpt2", "pre": name, "merges": merges}
    return None


def _pieces(tokenizer: Any) -> list[str] | None:
    text = tokenizer.normalizer.normalize_str(TEXT) if tokenizer.normalizer else TEXT
    if tokenizer.pre_tokenizer is None:
        return None
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _splits_of(name: str) -> list[str] | None:
    """Return the pieces into which the pre-tokenizer called `name` splits the test text."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    letters = {"model": "gpt2", "pre": name, "tokens": [letter.encode() for letter in alphabet], "merges": []}
    metadata = {f"{_KEY}{key}": value for key, value in letters.items()} | {f"{_KEY}add_bos_token": False}
    files = tokenizer_files(metadata, name)
    return _pieces(load_tokenizer(files["tokenizer.json"], name))


def _sentence_piece(described: Mapping[str, Any], original: Any) -> dict[str, MetadataValue] | None:
    """Return the metadata of BPE with byte fallback. A token's score is minus the index of its first merge."""
    ids: dict[str, int] = original.get_vocab(with_added_tokens=True)
    scores = np.full(max(ids.values()) + 1, _NEVER_MERGED, np.float32)
    for place, merge in reversed(list(enumerate(described["model"]["merges"]))):
        first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
        if first + second in ids:
            scores[ids[first + second]] = -place
    return {"model": "llama", "pre": "default", "scores": scores}


def _is_same(metadata: Mapping[str, MetadataValue], original: Any) -> bool:
    """Return True if the metadata, read as a GGUF file's, encodes the test text to the same ids."""
    stored = {
        key: [text.encode() for text in value] if isinstance(value, list) else value for key, value in metadata.items()
    }
    try:
        again = load_tokenizer(tokenizer_files(stored, "the metadata")["tokenizer.json"], "the metadata")
    except EdgekitError:
        return False
    return all(
        again.encode(TEXT, add_special_tokens=special).ids == original.encode(TEXT, add_special_tokens=special).ids
        for special in (False, True)
    )
