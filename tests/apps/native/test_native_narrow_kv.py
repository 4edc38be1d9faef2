"""Caches of 16 and 8 bits: the native library derives Python's graphs, keeps its numbers and writes its texts."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from edgekit_onnx.float16_kv import with_halves
from edgekit_onnx.int8_kv import with_steps
from narrow_graphs import compiled
from native_answers import tokens_of

import edgekit
from edgekit.apps.native.library import NativeLibrary, NativeModel
from edgekit.common.files import file_sha256
from edgekit.common.sealed_json import add_seal
from edgekit.errors import InvalidInput

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow]
BITS = (16, 8)
STEPS = "kv-steps.safetensors"
WINDOW = {"window": 64, "sinks": 4, "block": 9}
REPEATED = "".join(f"self.value_{number} = {number % 3}\n" for number in (1, 2, 3, 1, 2, 3, 1, 2))
# The last has several pieces of 64 tokens, which attend at once to a cache of 16 bits, and a piece of another size.
PROMPTS = (
    "import numpy as np", "class Größe 🙂:", REPEATED,
    "\n".join(f"value_{number} = {number * number}" for number in range(40)),
)  # fmt: skip
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 0.0, "stop": ["= 9", "def"]},
)


def with_window(plan: dict[str, Any]) -> None:
    plan["cache"] = WINDOW
    plan["storage"]["capacity_tokens"] = WINDOW["window"]


def changed(artifact: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the artifact with a changed plan, and with the sizes and hashes that its files have."""
    shutil.copytree(artifact, folder, dirs_exist_ok=folder.exists())
    reseal(folder, change)
    return folder


def reseal(folder: Path, change: Callable[[dict[str, Any]], None] = lambda plan: None) -> None:
    value = json.loads((folder / "manifest.json").read_bytes())
    del value["seal"]
    change(value["plan"])
    for name in list(value["files"]):
        path = folder / name
        if not path.exists():
            del value["files"][name]
        elif name == STEPS:
            value["files"][name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    (folder / "manifest.json").write_bytes(add_seal((json.dumps(value, indent=1) + "\n").encode()))


@pytest.fixture(scope="module", params=BITS)
def artifact(request: pytest.FixtureRequest, narrow_artifacts: dict[int, Path]) -> Path:
    return narrow_artifacts[request.param]


@pytest.fixture(scope="module")
def windowed(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(artifact, tmp_path_factory.mktemp("windows") / "windowed.edgekit", with_window)


@pytest.fixture(scope="module")
def model(library: NativeLibrary, artifact: Path) -> Iterator[NativeModel]:
    opened = library.open(artifact)
    yield opened
    opened.close()


def compare(model: NativeModel, runtime: edgekit.Runtime, max_tokens: int, **more: float) -> None:
    for seed, prompt in enumerate(PROMPTS):
        for options in OPTIONS:
            asked = {**options, "max_tokens": max_tokens, "seed": seed}
            native = model.generate(tokens_of(model, prompt), ignores_ends=True, **asked, **more)
            python = runtime.generate(prompt, ignore_eos=True, **asked)
            assert (native.text, native.tokens) == (python.text, python.tokens), (prompt, asked, more)
            assert native.finish_reason == python.finish_reason


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


def test_texts_are_those_of_python(model: NativeModel, artifact: Path) -> None:
    with edgekit.open(artifact, draft="off", prefixes=0) as runtime:
        compare(model, runtime, 48)


def test_texts_are_those_of_python_through_many_evictions(library: NativeLibrary, windowed: Path) -> None:
    model = library.open(windowed)
    with edgekit.open(windowed, draft="off", prefixes=0) as runtime:
        compare(model, runtime, 90)
        assert runtime.metrics().evictions > 30
    model.close()


@pytest.mark.parametrize("is_windowed", [False, True])
def test_exact_texts_do_not_depend_on_drafts_or_prefixes(
    library: NativeLibrary,
    narrow_artifacts: dict[int, Path],
    tmp_path: Path,
    open_exact: Callable[[Path], edgekit.Runtime],
    is_windowed: bool,
) -> None:
    place = narrow_artifacts[8]
    if is_windowed:
        place = changed(place, tmp_path / "windowed", with_window)
    model, accepted = library.open(place, exact=True), 0
    with open_exact(place) as runtime:
        for more in ({}, {"draft_tokens": 6}, {"reuses_prefix": 1}, {"draft_tokens": 3, "reuses_prefix": 1}):
            compare(model, runtime, 40, **more)
        for draft in (0, 6):
            accepted += model.generate(tokens_of(model, REPEATED), max_tokens=40, draft_tokens=draft).accepted_tokens
    model.close()
    assert accepted > 5


def test_exact_mode_is_refused_with_16_bits(library: NativeLibrary, narrow_artifacts: dict[int, Path]) -> None:
    with pytest.raises(InvalidInput, match="exact mode"):
        library.open(narrow_artifacts[16], exact=True)


def test_exact_mode_of_wide_heads_needs_8_bits(library: NativeLibrary, demo_artifact: Path, tmp_path: Path) -> None:
    def change(plan: dict[str, Any]) -> None:
        for layer in plan["model"]["layers"]:
            layer["head_dim"] = 256

    with pytest.raises(InvalidInput, match="a cache of 8 bits for heads of 256 values"):
        library.open(changed(demo_artifact, tmp_path / "wide", change), exact=True)


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
    reseal(folder)
    with pytest.raises(InvalidInput, match=f"{STEPS}.*export the artifact again") as caught:
        library.open(folder)
    assert "\n" not in str(caught.value)
