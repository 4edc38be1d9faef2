"""Caches of 16 and 8 bits: the native library derives Python's graphs, keeps its numbers and writes its texts."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edgekit_onnx.float16_kv import with_halves
from edgekit_onnx.int8_kv import with_steps
from manifests import change_manifest
from narrow_graphs import compiled
from native_answers import compare, with_plan

import edgekit
from edgekit.apps.native.library import NativeLibrary
from edgekit.common.files import file_sha256
from edgekit.errors import InvalidInput

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow]
BITS = (16, 8)
STEPS = "kv-steps.safetensors"


@pytest.mark.parametrize("bits", BITS)
def test_graphs_are_those_that_python_derives(demo_artifact: Path, tmp_path: Path, bits: int) -> None:
    onnx = pytest.importorskip("onnx")
    graph = next(demo_artifact.glob("body-*.onnx")).read_bytes()
    native = onnx.ModelProto.FromString(compiled(tmp_path)(graph, bits))
    python = onnx.ModelProto.FromString(with_halves(graph) if bits == 16 else with_steps(graph))
    for value in python.graph.input:
        if value.name.startswith("step."):
            value.type.tensor_type.ClearField("shape")  # which onnxruntime learns from the tensors
    assert native == python
    assert native != onnx.ModelProto.FromString(graph)


@pytest.mark.parametrize("bits", [16, pytest.param(8, marks=pytest.mark.long)])  # with windows: 8
def test_texts_are_those_of_python(library: NativeLibrary, narrow_artifacts: dict[int, Path], bits: int) -> None:
    model = library.open(narrow_artifacts[bits])
    with edgekit.open(narrow_artifacts[bits], draft="off", prefixes=0) as runtime:
        compare(model, runtime, 48)
    model.close()


def test_exact_mode_is_refused_with_16_bits(library: NativeLibrary, narrow_artifacts: dict[int, Path]) -> None:
    with pytest.raises(InvalidInput, match="exact mode"):
        library.open(narrow_artifacts[16], exact=True)


def test_exact_mode_of_wide_heads_needs_8_bits(library: NativeLibrary, demo_artifact: Path, tmp_path: Path) -> None:
    def change(plan: dict[str, Any]) -> None:
        for layer in plan["model"]["layers"]:
            layer["head_dim"] = 256

    with pytest.raises(InvalidInput, match="a cache of 8 bits for heads of 256 values"):
        library.open(with_plan(demo_artifact, tmp_path / "wide", change), exact=True)


def with_header(**fields: object) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header["steps"].update(fields)
        written = json.dumps(header).encode()
        return struct.pack("<Q", len(written)) + written + data[8 + length :]

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:4],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"\xff" * 8 + data[8:],
        with_header(dtype="F32"),
        with_header(shape=[2, 2]),
        with_header(data_offsets=[1, 2]),
        lambda data: None,
    ],
)
def test_steps_that_are_damaged_or_missing_are_refused(
    library: NativeLibrary, narrow_artifacts: dict[int, Path], tmp_path: Path, change: Callable[[bytes], bytes | None]
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(narrow_artifacts[8], folder)
    data = change((folder / STEPS).read_bytes())
    (folder / STEPS).unlink()
    if data is not None:
        (folder / STEPS).write_bytes(data)

    def reseal(manifest: dict[str, Any]) -> None:
        del manifest["files"][STEPS]
        if data is not None:
            manifest["files"][STEPS] = {"bytes": len(data), "sha256": file_sha256(folder / STEPS)}

    change_manifest(folder / "manifest.json", reseal)
    with pytest.raises(InvalidInput, match=f"{STEPS}.*export the artifact again") as caught:
        library.open(folder)
    assert "\n" not in str(caught.value)
