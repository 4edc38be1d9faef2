"""A cache of 8 bits on ONNX Runtime: near the wide one, a quarter of its size, and with everything else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT, FAST, export
from edgekit_onnx.narrow import STEPS_FILE, read_steps, with_steps

from edgekit.cache import Storage
from edgekit.errors import DamagedArtifact, Unsupported
from edgekit.interfaces import Chunk
from edgekit.plan import Plan
from edgekit.testing import check_engine
from edgekit.weights.safetensors import TensorFolder
from edgekit.weights.writing import TensorWriter

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

NEAR = 0.05  # a window that is left out makes it 0.5


class Made:
    """Exported files, opened as often as a test likes."""

    def __init__(self, folder: Path, family: str, recipe: str = "s4-g32", level: int = EXACT, **plan: Any) -> None:
        models.write_model(folder / "model", *models.FAMILIES[family])
        weights = models.weights_of(folder / "model", recipe, folder / "store")
        self.plan: Plan = models.plan_for(weights.model, weights.recipe, **{"chunk_tokens": 16, **plan})
        self.files = folder / "out"
        self.files.mkdir()
        export(self.plan, weights, self.files, models.quiet, accuracy_level=level)

    def open(self, *, exact: bool = False) -> OnnxEngine:
        return OnnxEngine(self.plan, self.files, exact=exact)

    def open_narrow(self, *, exact: bool = False) -> OnnxEngine:
        """One that is judged by its narrow cache alone."""
        engine = self.open(exact=exact)
        engine.abilities = engine.abilities.model_copy(update={"kv_bits": (8,)})
        return engine


def distance(wide: np.ndarray[Any, Any], narrow: np.ndarray[Any, Any]) -> float:
    """How far the logits are apart, over how far they spread."""
    return float(np.sqrt(np.mean((wide - narrow) ** 2)) / wide.std())


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("llama"), "llama", exits=(1,))


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_every_family_says_nearly_the_same_with_eight_bits(tmp_path: Path, family: str) -> None:
    """Prefill in pieces, past the windows that a model declares, and one token after the other."""
    engine = Made(tmp_path, family).open()
    tokens, said = list(models.tokens_of(40)), []
    for bits in engine.abilities.kv_bits:
        state = engine.start(Storage(capacity_tokens=64, kv_bits=bits))
        parts = [tokens[:16], tokens[16:29], *([token] for token in tokens[29:])]
        rows = [engine.forward([Chunk(state, part, len(part))])[0] for part in parts]
        said.append(np.concatenate(rows))
        state.close()
    wide, narrow = said
    assert not np.array_equal(wide, narrow), "it held as many bits"
    assert distance(wide, narrow) <= NEAR
    engine.close()


def test_the_contract_holds_with_eight_bits(llama: Made) -> None:
    check_engine(llama.open_narrow, exact=False, tolerance=5e-3, sequences=100)


def test_exact_mode_is_bitwise_with_eight_bits(llama: Made) -> None:
    check_engine(lambda: llama.open_narrow(exact=True), exact=True, tolerance=0, sequences=100)


@pytest.mark.parametrize("recipe", ["s4-g64", "s8"])
def test_exact_mode_is_bitwise_with_eight_bits_and_rounded_activations(tmp_path: Path, recipe: str) -> None:
    made = Made(tmp_path, "qwen3", recipe, FAST, exits=(1,))
    check_engine(lambda: made.open_narrow(exact=True), exact=True, tolerance=0, sequences=25)


def test_a_state_of_eight_bits_takes_a_quarter(llama: Made) -> None:
    engine = llama.open()
    wide, narrow = (engine.state_bytes(Storage(capacity_tokens=64, kv_bits=bits)) for bits in (32, 8))
    assert wide == 4 * narrow
    engine.close()


def test_keys_are_turned_back_where_a_block_goes(llama: Made) -> None:
    """After an eviction, a narrow state says what a wide one says after the same eviction."""
    engine, tokens, said = llama.open(), list(models.tokens_of(30)), []
    for bits in (32, 8):
        state = engine.start(Storage(capacity_tokens=64, kv_bits=bits))
        engine.forward([Chunk(state, tokens[:16], 0)])
        for stop in (10, 8, 6):
            state.evict(4, stop)
        engine.forward([Chunk(state, tokens[16:], 0)])
        said.append(engine.forward([Chunk(state, [3], 1)])[0])
        state.close()
    assert distance(*said) <= NEAR
    engine.close()


def test_a_plan_of_eight_bits_opens_as_planned(tmp_path: Path) -> None:
    made = Made(tmp_path, "llama", kv_bits=8)
    engine = made.open()
    state = engine.start(made.plan.storage)
    assert state.bytes == engine.state_bytes(made.plan.storage.model_copy(update={"kv_bits": 32})) // 4
    engine.close()


def test_what_no_state_holds_any_more_is_let_go(llama: Made) -> None:
    """A runtime that went down to 8 bits does not keep the sessions of 32."""
    engine = llama.open()
    engine.start(Storage(capacity_tokens=64, kv_bits=8))
    assert {form.is_narrow for form in engine._bodies._open} == {True}
    engine.start(Storage(capacity_tokens=64, kv_bits=32))
    assert {form.is_narrow for form in engine._bodies._open} == {True, False}
    engine.close()


def test_an_artifact_without_steps_refuses_eight_bits_by_name(tmp_path: Path) -> None:
    made = Made(tmp_path, "llama")
    (made.files / STEPS_FILE).unlink()
    engine = made.open()
    assert engine.abilities.kv_bits == (32,)
    with pytest.raises(Unsupported, match="8-bit keys and values"):
        engine.start(Storage(capacity_tokens=64, kv_bits=8))
    engine.close()


@pytest.mark.parametrize("damage", ["zero", "shape", "missing", "extra", "cut", "link"])
def test_damaged_steps_are_refused(tmp_path: Path, damage: str) -> None:
    made = Made(tmp_path, "llama")
    path = made.files / STEPS_FILE
    with TensorFolder.open(path) as tensors:
        arrays = {name: np.array(tensors.array(name)) for name in tensors.entries}
    if damage == "zero":
        arrays["0.key"][0, 0] = 0
    elif damage == "shape":
        arrays["0.key"] = arrays["0.key"].T
    elif damage == "missing":
        del arrays["1.value"]
    elif damage == "extra":
        arrays["9.key"] = arrays["0.key"]
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    elif damage == "link":
        os.link(path, tmp_path / "other")
    else:
        path.unlink()
        with TensorWriter(path, {name: ("F32", array.shape) for name, array in arrays.items()}) as writer:
            for name, array in arrays.items():
                writer.write(name, np.ascontiguousarray(array))
            writer.seal()
    with pytest.raises(DamagedArtifact, match=r"export the artifact again|its own"):
        made.open()


def test_both_channels_that_are_turned_into_each_other_have_one_step(tmp_path: Path) -> None:
    """Otherwise an eviction would leave the range, or mix whole numbers of different size."""
    made = Made(tmp_path, "phi3 with longrope")
    steps = read_steps(made.files, made.plan.model)
    assert steps is not None
    for keys, _ in steps:
        width = keys.shape[1] // 2  # this family turns half of each head
        np.testing.assert_array_equal(keys[:, : width // 2], keys[:, width // 2 : width])
        assert not np.array_equal(keys[:, width : width + width // 2], keys[:, width + width // 2 : 2 * width])


def test_a_graph_is_changed_once(llama: Made) -> None:
    """A graph that onnxruntime has saved states its defaults already; nothing may stand twice."""
    import onnx

    data = next(path for path in llama.files.iterdir() if path.name.startswith("body-0")).read_bytes()
    changed = onnx.ModelProto.FromString(with_steps(data))
    for node in changed.graph.node:
        names = [attribute.name for attribute in node.attribute]
        assert len(names) == len(set(names))
