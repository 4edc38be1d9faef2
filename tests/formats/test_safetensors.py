"""Safetensors: header validation of untrusted files, refusal of pickles, and atomic writing."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors_files as files
from safetensors_files import entry

from edgekit.errors import InvalidInput, OutOfSpace, Unsupported
from edgekit.formats.int_packing import bf16_to_float32, float32_to_bf16
from edgekit.formats.safetensors import INDEX, TensorFolder, read_header
from edgekit.formats.safetensors_writer import TensorWriter

GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("BF16", [4], 16, 24)}
HUGE = 1 << 61

BROKEN: dict[str, tuple[Any, bytes, int | None, str]] = {
    "an empty file's worth of header": ({}, b"", 0, "offset 0"),
    "a header longer than the file": (GOOD, bytes(24), 1 << 20, "offset 0"),
    "a header of eight exbibytes": (GOOD, bytes(24), (1 << 63) - 1, "offset 0"),
    "a header above the cap": (GOOD, bytes(24), 100_000_001, "offset 0"),
    "data cut short": (GOOD, bytes(20), None, "'b'.*beyond"),
    "data after the last tensor": (GOOD, bytes(30), None, "'b' ends at offset"),
    "a gap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 8, 12)}, bytes(12), None, "'b' at offset .* gap"),
    "an overlap": ({"a": entry("U8", [8], 0, 8), "b": entry("U8", [8], 4, 12)}, bytes(12), None, "'b' .* overlaps"),
    "data before the first": ({"a": entry("U8", [4], 4, 8)}, bytes(8), None, "'a' at offset .* gap"),
    "twice the same bytes": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, bytes(4), None, "overlaps"),
    "offsets in the wrong order": ({"a": entry("U8", [0], 4, 0)}, bytes(4), None, "'a'.*not two offsets"),
    "negative offsets": ({"a": entry("U8", [4], -4, 0)}, bytes(4), None, "'a'.*not two offsets"),
    "offsets that are no whole numbers": ({"a": entry("U8", [4], 0, 4.0)}, bytes(4), None, "'a'.*not two offsets"),  # type: ignore[arg-type]
    "an offset that is a truth value": ({"a": entry("U8", [1], False, True)}, bytes(1), None, "'a'.*not two offsets"),
    "a shape that needs more": ({"a": entry("F32", [3], 0, 8)}, bytes(8), None, "'a'.*needs 12 bytes, 8 stand at"),
    "a shape that overflows": ({"a": entry("F32", [HUGE, 8], 0, 0)}, b"", None, "'a'.*needs"),
    "a shape with a negative size": ({"a": entry("F32", [-1, -2], 0, 8)}, bytes(8), None, "'a'.*not a shape"),
    "too many dimensions": ({"a": entry("U8", [1] * 9, 0, 1)}, bytes(1), None, "'a'.*not a shape"),
    "a shape that goes on for ever": ({"a": entry("U8", [1] * 100_000, 0, 1)}, bytes(1), None, "'a'.*not a shape"),
    "an unknown type": ({"a": entry("F7", [1], 0, 1)}, bytes(1), None, "'a'.*unknown dtype 'F7'"),
    "a field that nobody knows": ({"a": {**GOOD["a"], "offset": 3}}, bytes(16), None, "'a'.*needs exactly"),
    "an entry that is no object": ({"a": 3}, b"", None, "'a'.*needs exactly"),
    "a nameless tensor": ({"": entry("U8", [1], 0, 1)}, bytes(1), None, "name"),
    "the same name twice": ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":3}', bytes(1), None, "twice"),
    "a header that is no object": ("[1, 2]", b"", None, "expected an object"),
    "a header that is no JSON": ("{'a': 1}", b"", None, "not valid JSON"),
    "a header that holds NaN": ('{"a": NaN}', b"", None, "NaN"),
    "a header nested to death": ('{"a":' * 50_000 + "1" + "}" * 50_000, b"", None, "nested|deep|JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_with_tensor_and_offset(tmp_path: Path, case: str) -> None:
    header, data, length, message = BROKEN[case]
    path = files.write(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(InvalidInput, match=message):
        read_header(path)
    with pytest.raises(InvalidInput):
        TensorFolder.open(tmp_path)


def test_a_valid_file_is_read_back(tmp_path: Path) -> None:
    values = np.arange(4, dtype="<f4").tobytes() + float32_to_bf16(np.array([1, -2, 0.5, 3], np.float32)).tobytes()
    files.write(tmp_path / "model.safetensors", {"__metadata__": {"format": "pt"}, **GOOD}, values)
    with TensorFolder.open(tmp_path) as folder:
        assert folder.array("a").tolist() == [[0, 1], [2, 3]]
        assert folder.array("a", slice(1, 2)).tolist() == [[2, 3]]
        assert folder.floats("b").tolist() == [1, -2, 0.5, 3]
        assert not folder.array("a").flags.writeable
        place = folder.place("b")
        assert place.path.read_bytes()[place.offset : place.offset + place.length] == values[16:]
        folder.release("a")
        assert folder.array("a").tolist() == [[0, 1], [2, 3]], "pages come back when they are read"
        with pytest.raises(InvalidInput, match="tensor 'c' is missing"):
            folder.array("c")


PICKLES = ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"]


@pytest.mark.parametrize("name", PICKLES)
def test_pickled_weights_are_refused_by_type_and_never_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not read")
    (tmp_path / name).chmod(0)
    opened: list[str] = []
    sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(Unsupported, match="pickled"):
            TensorFolder.open(place)
    assert not [path for path in opened if path.endswith(name)]


def test_an_index_may_only_name_files_of_its_folder(tmp_path: Path) -> None:
    files.write(tmp_path / "other.safetensors", GOOD, bytes(24))
    folder = tmp_path / "model"
    folder.mkdir()
    for shard in ("../other.safetensors", str(tmp_path / "other.safetensors"), "..", "a/../../other.safetensors", 3):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
        with pytest.raises(InvalidInput, match="not a file name"):
            TensorFolder.open(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    with pytest.raises(Unsupported, match="pickled"):
        TensorFolder.open(folder)


def test_shards_hold_what_their_index_says(tmp_path: Path) -> None:
    files.write(tmp_path / "one.safetensors", {"a": entry("U8", [1], 0, 1)}, b"\1")
    files.write(tmp_path / "two.safetensors", {"b": entry("U8", [1], 0, 1)}, b"\2")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with TensorFolder.open(tmp_path) as folder:
        assert (folder.array("a")[0], folder.array("b")[0]) == (1, 2)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(InvalidInput, match="'b' is missing"):
        TensorFolder.open(tmp_path)
    files.write(tmp_path / "two.safetensors", {"a": entry("U8", [1], 0, 1)}, b"\2")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(InvalidInput, match="is in"):
        TensorFolder.open(tmp_path)


TENSORS = {"w": ("F32", (64, 8)), "scale": ("BF16", (64, 1)), "bytes": ("U8", (3,)), "none": ("F16", (0, 4))}


def test_rows_may_be_written_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    values = np.arange(512, dtype=np.float32).reshape(64, 8)
    with TensorWriter(path, TENSORS) as writer:
        for first in (32, 0, 48, 16):
            writer.write("w", values[first : first + 16], first)
        writer.write("bytes", np.array([1, 2, 3], np.uint8))
        writer.write("scale", float32_to_bf16(values[:, :1]))
        writer.seal()
    with TensorFolder.open(tmp_path) as folder:
        assert (folder.array("w") == values).all()
        assert (bf16_to_float32(folder.array("scale")) == values[:, :1]).all()
        assert all(item.start % 4 == 0 for name, item in folder.entries.items() if name == "w")
    assert [item.name for item in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), TensorWriter(tmp_path / "model.safetensors", TENSORS) as writer:  # noqa: PT012
        writer.write("w", np.zeros((64, 8), np.float32))
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_was_not_written_whole_is_never_sealed(tmp_path: Path) -> None:
    with TensorWriter(tmp_path / "m", TENSORS) as writer:
        writer.write("w", np.zeros((63, 8), np.float32))
        with pytest.raises(AssertionError, match="not written whole"):
            writer.seal()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutOfSpace) as caught:
        TensorWriter(tmp_path / "m", {"w": ("F32", (1 << 30, 1 << 12))})
    assert caught.value.needed_bytes > 1 << 44
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_disk_that_fills_up_says_how_much_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutOfSpace) as caught:  # noqa: PT012 — the call fails while writing or while sealing
        monkeypatch.setattr(os, call, full)
        with TensorWriter(tmp_path / "m", {"w": ("F32", (4, 4))}) as writer:
            writer.write("w", np.zeros((4, 4), np.float32))
            writer.seal()
    assert caught.value.needed_bytes > 64
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_file_sizes_is_the_same_typed_error(tmp_path: Path) -> None:
    """In a child, because the limit cannot be lifted again."""
    program = f"""
import signal, resource, numpy, pathlib
from edgekit.errors import OutOfSpace
from edgekit.formats.safetensors_writer import TensorWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    TensorWriter(pathlib.Path({str(tmp_path / "m")!r}), {{"w": ("F32", (1000, 100))}})
except OutOfSpace as error:
    print("needed", error.needed_bytes, error)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("needed 400")
    assert "limit on file sizes" in done.stdout and "free" not in done.stdout
    assert list(tmp_path.iterdir()) == []
