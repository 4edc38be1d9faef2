"""Segments are split, written and read; damaged and foreign files are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekit.enginekit.kv_segment import KeyValues, SegmentPart, read_key_values
from edgekit.errors import DamagedArtifact, InvalidInput

PARTS = [SegmentPart(2, 4, np.dtype("<f4")), SegmentPart(2, 1, np.dtype("<u4"))]
FORMS = {"8-bit": PARTS}
MAGIC = b"edgekit segment 1\n"


def segment(tokens: int = 5, start: int = 3) -> KeyValues:
    random = np.random.default_rng(0)
    arrays = [(random.random((part.rows, tokens, part.width)) * 9).astype(part.dtype) for part in PARTS]
    return KeyValues("model", "8-bit", start, arrays)


def read(path: Path, model: str = "model", capacity: int = 16) -> KeyValues:
    return read_key_values(path, [model], FORMS, capacity)


@pytest.mark.parametrize("count", [0, 2, 5])
def test_split_copies_both_parts(count: int) -> None:
    whole = segment()
    first, second = whole.split(count)
    assert (first.tokens, second.tokens, second.start) == (count, 5 - count, 3 + count)
    for one, other, both in zip(first.arrays, second.arrays, whole.arrays, strict=True):
        np.testing.assert_array_equal(np.concatenate([one, other], axis=1), both)
        assert not np.shares_memory(one, both) and not np.shares_memory(other, both)
    assert first.bytes + second.bytes == whole.bytes


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_written_segment_is_read_back(tmp_path: Path, tokens: int) -> None:
    segment(tokens).write(tmp_path / "kv")
    found = read(tmp_path / "kv")
    assert (found.start, found.tokens, found.form) == (3, tokens, "8-bit")
    for one, other in zip(found.arrays, segment(tokens).arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_split_beyond_its_ends_is_refused() -> None:
    for count in (-1, 6):
        with pytest.raises(InvalidInput, match="5 tokens cannot be split"):
            segment().split(count)


HEADERS: dict[str, dict[str, Any]] = {
    "another model": {"model": "other"},
    "no such form": {"form": "2-bit"},
    "form is a list": {"form": []},
    "negative start": {"start": -1},
    "negative tokens": {"tokens": -5},
    "more tokens than a state holds": {"tokens": 14},
    "beyond the state by its start": {"start": 12},
    "a billion tokens": {"tokens": 10**9},
    "tokens as text": {"tokens": "5"},
    "tokens as truth": {"tokens": True},
    "fewer tokens than bytes": {"tokens": 4},
    "another hash": {"sha256": "0" * 64},
    "no hash": {"sha256": None},
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_false_header_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    body = b"".join(array.tobytes() for array in segment().arrays)
    header = {"model": "model", "form": "8-bit", "start": 3, "tokens": 5, "sha256": hashlib.sha256(body).hexdigest()}
    (tmp_path / "kv").write_bytes(MAGIC + json.dumps(header).encode() + b"\n" + body)
    assert read(tmp_path / "kv").tokens == 5
    (tmp_path / "kv").write_bytes(MAGIC + json.dumps(header | change).encode() + b"\n" + body)
    with pytest.raises((InvalidInput, DamagedArtifact), match="kv: "):
        read(tmp_path / "kv")


@pytest.mark.parametrize(
    "data",
    [b"", MAGIC, b"PK\x03\x04", MAGIC + b"x" * 5000, MAGIC + b"{]\n", MAGIC + b"[1]\n", MAGIC + b"{}\n"],
    ids=["empty", "magic alone", "a zip", "endless header", "no JSON", "a list", "an empty object"],
)
def test_foreign_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "kv").write_bytes(data)
    with pytest.raises(InvalidInput, match="kv"):
        read(tmp_path / "kv")


def test_a_file_larger_than_any_segment_is_never_read(tmp_path: Path) -> None:
    with (tmp_path / "kv").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidInput, match="is more than the"):
        read(tmp_path / "kv")
