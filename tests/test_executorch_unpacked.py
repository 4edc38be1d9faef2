"""The weights of a program are read back out of its own bytes: the neutral weights again, and damage is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("executorch")
pytest.importorskip("transformers")

import measured
from edgekit_executorch import ExecutorchTarget
from edgekit_executorch.layout import PROGRAM
from executorch_models import Made, program, usual

from edgekit.errors import DamagedArtifact, EdgekitError
from edgekit.self_check import self_check
from edgekit.testing import check_weights
from edgekit.weights.quantise import quiet

pytestmark = [pytest.mark.executorch, pytest.mark.quantize, pytest.mark.slow]

CASES = [
    ("llama untied, with biases", "s8", 1),
    ("phi3", "s4-g32", 1),  # one matrix for queries, keys and values, one for gate and up
    ("gemma3", "float32", 2),  # norms of heads and after blocks, each with an offset
    ("gemma2", "float32", 2),
]


@pytest.mark.parametrize(("family", "recipe", "layers"), CASES, ids=[f"{family}, {it}" for family, it, _ in CASES])
def test_what_was_packed_is_unpacked(family: str, recipe: str, layers: int) -> None:
    made = program(family, recipe, layers)
    check_weights(ExecutorchTarget(), made.plan, made.files, made.weights)


def test_weights_biases_and_an_exit_are_those_of_the_model() -> None:
    check_weights(ExecutorchTarget(), usual().plan, usual().files, usual().weights)


def damaged(made: Made, folder: Path, old: bytes, place: int, mask: int) -> Path:
    """A copy whose only bytes like `old` have one of theirs changed."""
    data = bytearray((made.files / PROGRAM).read_bytes())
    assert data.count(old) == 1
    data[data.index(old) + place] ^= mask
    (folder / PROGRAM).write_bytes(bytes(data))
    return folder


def differences(made: Made, files: Path) -> dict[str, list[tuple[int, ...]]]:
    found = {}
    for name, values in ExecutorchTarget().weights(made.plan, files):
        places = np.argwhere(values != made.weights.tensor(name))
        if len(places):
            found[name] = [tuple(map(int, place)) for place in places]
    return found


def test_one_flipped_nibble_is_found_where_it_is(tmp_path: Path) -> None:
    made = usual()
    name = "model.layers.1.mlp.down_proj"
    files = damaged(made, tmp_path, made.weights.packed(name).tobytes(), 5, 0x30)
    assert differences(made, files) == {f"{name}.weight": [(0, 11)]}


def test_a_changed_scale_is_found_in_its_group(tmp_path: Path) -> None:
    made = usual()
    name = "model.layers.0.self_attn.o_proj"
    scales = (made.weights.scales(name).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    found = differences(made, damaged(made, tmp_path, scales, 2, 0x01))
    assert set(found) == {f"{name}.weight"}
    assert {(row, column // 32) for row, column in found[f"{name}.weight"]} == {(0, 1)}


def test_a_head_that_is_no_longer_its_table_is_named(tmp_path: Path) -> None:
    made = usual()
    data = bytearray((made.files / PROGRAM).read_bytes())
    table = made.weights.integers("model.embed_tokens").tobytes()
    assert data.count(table) == 2
    data[data.index(table) + 3] ^= 1
    (tmp_path / PROGRAM).write_bytes(bytes(data))
    with pytest.raises(DamagedArtifact, match=r"model\.embed_tokens\.weight\[0, 3\] is .* in the head"):
        list(ExecutorchTarget().weights(made.plan, tmp_path))


def test_damaged_programs_are_refused_and_never_more_than_that(tmp_path: Path) -> None:
    made = usual()
    whole = (made.files / PROGRAM).read_bytes()
    for size in (0, 30, 400, len(whole) // 2, len(whole) - 64):
        (tmp_path / PROGRAM).write_bytes(whole[:size])
        assert measured.refused(lambda: list(ExecutorchTarget().weights(made.plan, tmp_path)))
    random = np.random.default_rng(0)
    for _ in range(60):  # any answer, so long as it is ours
        changed = bytearray(whole)
        for place in random.integers(0, 60_000, 6):
            changed[place] = random.integers(256)
        (tmp_path / PROGRAM).write_bytes(bytes(changed))
        try:
            for _, values in ExecutorchTarget().weights(made.plan, tmp_path):
                assert values.dtype == np.float32
        except EdgekitError:
            continue


def test_a_program_of_another_model_is_refused(tmp_path: Path) -> None:
    made, other = usual(), program("gemma2", "float32", 2)
    shutil.copyfile(other.files / PROGRAM, tmp_path / PROGRAM)
    assert "its plan says" in measured.refused(lambda: list(ExecutorchTarget().weights(made.plan, tmp_path)))


class Absent(ExecutorchTarget):
    """Its library is not on this machine."""

    def missing(self) -> str | None:
        return "not installed here"


def test_where_a_program_cannot_run_an_export_reads_back_what_it_packed(tmp_path: Path) -> None:
    made = usual()
    found = self_check(Absent(), made.plan, made.weights, made.files, quiet)
    assert found == "packed-only: 15 quantised matrices read back bit for bit; not installed here"
    name = "model.layers.0.mlp.up_proj"
    files = damaged(made, tmp_path, made.weights.packed(name).tobytes(), 0, 0x01)
    said = measured.refused(lambda: self_check(Absent(), made.plan, made.weights, files, quiet))
    assert f"{name}.weight was packed wrongly" in said
