"""Weights read back out of a program's bytes equal the neutral weights, and damage is located."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("executorch")
pytest.importorskip("transformers")

import measured
from edgekit_executorch import ExecutorchTarget
from edgekit_executorch.inspection import read_contents
from edgekit_executorch.layout import PROGRAM
from edgekit_executorch.sharing import share_constants
from engines import Model, lower, program
from executorch_models import SHARED, usual
from kept import EXPORTS, kept

from edgekit.artifact.self_check import self_check
from edgekit.common.progress import no_progress
from edgekit.contracts.engine import Chunk
from edgekit.errors import DamagedArtifact, EdgekitError
from edgekit.testing import check_weights

pytestmark = [pytest.mark.executorch, pytest.mark.quantize, pytest.mark.slow]
SOURCES = (*EXPORTS, "targets/edgekit_executorch")


def test_weights_have_their_own_places_in_the_program() -> None:
    made = usual()
    data, places = (made.files / PROGRAM).read_bytes(), ExecutorchTarget().tensor_places(made.files)
    assert {place.path for place in places} == {made.files / PROGRAM}
    reached = 0
    for place in places:
        assert place.offset <= reached
        reached = max(reached, place.offset + place.length)
    assert reached == len(data)
    parts = {place.offset: data[place.offset : place.offset + place.length] for place in places}
    # Rows of queries and keys are stored in another order.
    for module in (f"model.layers.0.{name}" for name in ("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")):
        packed = made.weights.packed(module).tobytes()
        scales = (made.weights.scales(module).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        stored = parts[data.index(packed)]
        assert stored.startswith(packed) and scales in stored[len(packed) :], module
        assert len(stored) - len(packed) - len(scales) < 128, module


def damaged(made: Model, folder: Path, old: bytes, place: int, mask: int) -> Path:
    """A copy of the program in which one byte of `old` is changed."""
    data = bytearray((made.files / PROGRAM).read_bytes())
    assert data.count(old) == 1
    data[data.index(old) + place] ^= mask
    (folder / PROGRAM).write_bytes(bytes(data))
    return folder


def differences(made: Model, files: Path) -> dict[str, list[tuple[int, ...]]]:
    found = {}
    for name, values in ExecutorchTarget().weights(made.plan, files):
        places = np.argwhere(values != made.weights.tensor(name))
        if len(places):
            found[name] = [tuple(map(int, place)) for place in places]
    return found


def test_flipped_nibble_is_located(tmp_path: Path) -> None:
    made = usual()
    name = "model.layers.1.mlp.down_proj"
    files = damaged(made, tmp_path, made.weights.packed(name).tobytes(), 5, 0x30)
    assert differences(made, files) == {f"{name}.weight": [(0, 11)]}


def test_changed_scale_is_located(tmp_path: Path) -> None:
    made = usual()
    name = "model.layers.0.self_attn.o_proj"
    scales = (made.weights.scales(name).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    found = differences(made, damaged(made, tmp_path, scales, 2, 0x01))
    assert set(found) == {f"{name}.weight"}
    assert {(row, column // 32) for row, column in found[f"{name}.weight"]} == {(0, 1)}


@pytest.fixture(scope="module")
def unshared() -> Model:
    """A program of one layer as older versions wrote it, with a second copy of the tied table."""
    made = program("qwen2", layers=1)

    def write(folder: Path) -> None:
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("edgekit_executorch.lowering.share_constants", lambda path: 0)
            lower(made.plan, made.weights, folder)

    return made._replace(files=kept(write, SOURCES, "unshared"))


def test_tied_head_shares_bytes_of_table(unshared: Model, tmp_path: Path) -> None:
    table = unshared.weights.integers("model.embed_tokens").tobytes()
    before = (unshared.files / PROGRAM).read_bytes()
    assert before.count(table) == 2
    shutil.copyfile(unshared.files / PROGRAM, tmp_path / PROGRAM)
    saved = share_constants(tmp_path / PROGRAM)
    after = (tmp_path / PROGRAM).read_bytes()
    assert after.count(table) == 1
    assert len(before) - len(after) == saved >= len(table) // 4096 * 4096
    assert share_constants(tmp_path / PROGRAM) == 0
    check_weights(ExecutorchTarget(), unshared.plan, tmp_path, unshared.weights)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    said = []
    for files in (unshared.files, tmp_path):
        engine = ExecutorchTarget().open(unshared.plan, files)
        state = engine.start(unshared.plan.storage)
        said.append(engine.forward([Chunk(state, tokens, len(tokens))])[0])
        engine.close()
    assert np.array_equal(*said)


def test_float_tied_head_shares_bytes_of_table() -> None:
    made = program("gemma3", "float32", kv_bits=32, **SHARED)
    table = made.weights.dequantised("model.embed_tokens").astype("<f4").tobytes()
    assert (made.files / PROGRAM).read_bytes().count(table) == 1


def test_differing_copy_of_tied_table_is_named(unshared: Model, tmp_path: Path) -> None:
    made = unshared
    data = bytearray((made.files / PROGRAM).read_bytes())
    table = made.weights.integers("model.embed_tokens").tobytes()
    data[data.index(table) + 3] ^= 1
    (tmp_path / PROGRAM).write_bytes(bytes(data))
    with pytest.raises(DamagedArtifact, match=r"model\.embed_tokens\.weight\[0, 3\] is .* in the head"):
        list(ExecutorchTarget().weights(made.plan, tmp_path))


def test_damaged_programs_raise_only_edgekit_errors(tmp_path: Path) -> None:
    made = usual()
    whole = (made.files / PROGRAM).read_bytes()
    for size in (0, 30, 400, len(whole) // 2, len(whole) - 64):
        (tmp_path / PROGRAM).write_bytes(whole[:size])
        assert measured.refused(lambda: list(ExecutorchTarget().weights(made.plan, tmp_path)))
    for data in (
        b"PK\x03\x04" + whole[4:],
        b"\xff\xff\xff\x7f" + whole[4:],
    ):
        (tmp_path / PROGRAM).write_bytes(data)
        with pytest.raises(DamagedArtifact):
            read_contents(tmp_path / PROGRAM)
    random = np.random.default_rng(0)
    for turn in range(120):  # any answer, so long as it is ours
        changed = bytearray(whole)
        for place in random.integers(0, 4096 if turn % 2 else 60_000, 6):
            changed[place] = random.integers(256)
        (tmp_path / PROGRAM).write_bytes(bytes(changed))
        try:
            for _, values in ExecutorchTarget().weights(made.plan, tmp_path):
                assert values.dtype == np.float32
        except EdgekitError:
            continue


def test_a_program_of_another_model_is_refused(tmp_path: Path) -> None:
    made, other = usual(), program("gemma3", "float32", kv_bits=32, **SHARED)
    shutil.copyfile(other.files / PROGRAM, tmp_path / PROGRAM)
    assert "its plan says" in measured.refused(lambda: list(ExecutorchTarget().weights(made.plan, tmp_path)))


def test_self_check_without_runtime_reads_weights_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = usual()
    monkeypatch.setattr(ExecutorchTarget, "missing", lambda target: "not installed here")
    found = self_check(ExecutorchTarget(), made.plan, made.weights, made.files, no_progress).summary
    assert found == "packed-only: 15 quantised matrices read back bit for bit; not run: not installed here"
    name = "model.layers.0.mlp.up_proj"
    files = damaged(made, tmp_path, made.weights.packed(name).tobytes(), 0, 0x01)
    said = measured.refused(lambda: self_check(ExecutorchTarget(), made.plan, made.weights, files, no_progress))
    assert f"{name}.weight was packed wrongly" in said
