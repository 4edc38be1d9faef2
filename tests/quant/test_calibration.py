"""Calibration text comes as text, chats or tokens; it is packed and hashed, with a warning if it has no chats."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from edgekit.errors import EdgekitError, InvalidInput
from edgekit.model.source import open_source
from edgekit.quant.calibration import Calibration, default_text, read_calibration

DEMO = open_source("demo").folder


def read(path: Path | None, **options: object) -> Calibration:
    return read_calibration(path, DEMO, **{"sequences": 4, "length": 32, **options})  # type: ignore[arg-type]


def test_bundled_text_fills_the_default_number_of_sequences() -> None:
    found = read_calibration(None, DEMO)
    assert (found.fact.sequences, found.fact.tokens) == (24, 24 * 512)
    assert default_text().stat().st_size < 400_000
    assert "default text" in found.fact.description


def test_sequences_are_spread_over_the_whole_text(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(4000))
    found = read(path)
    assert [sequence[0] for sequence in found.sequences] == [0, 1312, 2656, 3968]
    assert all(len(sequence) == 32 for sequence in found.sequences)


def test_the_hash_is_that_of_the_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(2000))
    np.save(tmp_path / "b.npy", np.arange(2000).reshape(2, 1000))
    np.save(tmp_path / "c.npy", np.arange(1, 2001))
    a, b, c = (read(tmp_path / f"{name}.npy").fact.sha256 for name in "abc")
    assert a == b != c
    assert read(tmp_path / "a.npy", length=16).fact.sha256 != a


def test_chats_are_written_by_the_models_template(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    chat = {"messages": [{"role": "user", "content": "import os " * 40}, {"role": "assistant", "content": "x = 1"}]}
    path.write_text("\n".join([json.dumps(chat), "", json.dumps(chat)]))
    seen: list[int] = []

    def render(messages: object) -> str:
        seen.append(len(messages))  # type: ignore[arg-type]
        return "def spoken():\n" * 60

    found = read(path, render=render)
    assert seen == [2, 2]
    assert not [warning for warning in found.warnings if "template" in warning]
    with pytest.raises(InvalidInput, match=r"chats\.jsonl:1: holds messages"):
        read(path)


def test_text_without_chats_gives_a_warning_for_a_chat_model(tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_text("the quick brown fox\n" * 200)
    assert any("chat template" in warning for warning in read(path).warnings)
    marks = read(path).warnings[0].partition("(")[2].partition(")")[0].split(", ")
    path.write_text(f"{marks[0]}hello" + " the quick brown fox\n" * 200)
    assert not any("chat template" in warning for warning in read(path).warnings)
    plain = tmp_path / "plain"
    shutil.copytree(DEMO, plain)
    (plain / "chat_template.jinja").unlink()
    path.write_text("the quick brown fox\n" * 200)
    assert read_calibration(path, plain, sequences=4, length=32).warnings == ()


def test_too_little_text_is_used_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(100))
    found = read(path)
    assert found.fact.sequences == 3
    assert "fills 3 of 4" in found.warnings[0]


BAD = {
    "no.jsonl": (b'{"text": 3}\n', "needs `text` or `messages`"),
    "broken.jsonl": (b'{"text": "a"}\n{"text"\n', "broken.jsonl:2"),
    "bytes.txt": (b"\xff\xfe\x00", "UTF-8"),
    "short.txt": (b"x", "at least"),
    "floats.npy": (None, "whole numbers"),
    "outside.npy": (None, "outside the vocabulary"),
    "negative.npy": (None, "outside the vocabulary"),
    "pickle.npy": (None, "not a numpy file"),
    "bomb.npy": (None, "not a numpy file"),
    "missing.txt": (None, "cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_text_is_refused_by_name(tmp_path: Path, name: str) -> None:
    data, message = BAD[name]
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    elif name == "floats.npy":
        np.save(path, np.zeros(100))
    elif name == "outside.npy":
        np.save(path, np.full(1000, 10**6))
    elif name == "negative.npy":
        np.save(path, np.full(1000, -1))
    elif name == "bomb.npy":
        np.save(path, np.zeros(1000, np.int64))
        path.write_bytes(
            path.read_bytes().replace(b"(1000,), }    ", b"(1 << 40,), } ").replace(b"1 << 40", b"9999999")
        )
    elif name == "pickle.npy":
        np.save(path, np.array([{"a": os.getpid()}] * 100, object), allow_pickle=True)
    with pytest.raises(InvalidInput, match=message):
        read(path)


def with_bos(folder: Path) -> Path:
    """A copy of the demo model whose tokenizer puts token 2 before every text."""
    shutil.copytree(DEMO, folder)
    place = folder / "tokenizer.json"
    stated = json.loads(place.read_text())
    mark = next(token["content"] for token in stated["added_tokens"] if token["id"] == 2)
    stated["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": mark, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {mark: {"id": mark, "ids": [2], "tokens": [mark]}},
    }
    place.write_text(json.dumps(stated))
    return folder


def test_each_sequence_begins_with_bos_where_the_tokenizer_has_one(tmp_path: Path) -> None:
    folder = with_bos(tmp_path / "model")
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": "the quick brown fox\n" * 20}) for _ in range(4)))
    rows = read_calibration(path, folder, sequences=8, length=32).sequences
    assert len(rows) > 1
    assert all(row[0] == 2 and 2 not in row[1:] and len(row) == 32 for row in rows)
    assert all(2 not in row for row in read_calibration(path, DEMO, sequences=8, length=32).sequences)


def test_bundled_chats_are_rendered_without_warnings() -> None:
    rendered: list[int] = []

    def render(messages: object) -> str:
        rendered.append(len(messages))  # type: ignore[arg-type]
        return "<chat>"

    ours = read_calibration(None, DEMO, render=render)
    assert ours.warnings == ()
    assert len(rendered) == 51


def test_bundled_chats_stay_readable_where_the_template_refuses_them() -> None:
    def refuse(messages: object) -> str:
        raise InvalidInput("no system role")

    refused = read_calibration(None, DEMO, render=refuse)
    assert refused.fact.sha256 == read_calibration(None, DEMO).fact.sha256


def test_held_out_text_is_not_in_the_calibration_text() -> None:
    corpus = default_text().read_text()
    for path in (Path(__file__).parents[2] / "examples" / "benchmarks" / "held_out").glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if len(line) > 60]
        assert len(lines) > 50
        assert not [line for line in lines if json.dumps(line, ensure_ascii=False)[1:-1] in corpus]


ODD: dict[str, dict[str, object]] = {
    "an expression that backtracks without end": {
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "(.*)*(.*)*b"}, "behavior": "Isolated", "invert": False,
        }
    },
    "no token for unknown words": {
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {"a": 0},
        }
    },
    "a template of a token that the model lacks": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1_000_000], "tokens": ["<s>"]}},
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_a_tokenizer_that_fails_at_a_text_is_refused_in_one_line(tmp_path: Path, odd: str) -> None:
    bundled = json.loads((DEMO / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(bundled | ODD[odd]))
    with pytest.raises(EdgekitError) as refused:
        read_calibration(None, tmp_path, vocabulary=4096)
    assert "\n" not in str(refused.value)
