"""What only some layers have (shared caches, recurrent parts) on onnxruntime, and weights that are read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgekit.contracts.memory import MemoryLoad, total

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import gc
import json
import sys

import family_models as models
import measured
from configs import QWEN_35_SMALL
from edgekit_onnx import OnnxTarget
from edgekit_onnx.audit import audit
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import FAST
from edgekit_onnx.memory import facts, memory_terms
from edgekit_onnx.prepacking import pack
from engines import Model, onnx_model, spaced
from process_files import open_files

from edgekit.artifact.self_check import self_check
from edgekit.contracts import recurrent
from edgekit.contracts.feeding import feed
from edgekit.contracts.recipe import named_recipe
from edgekit.contracts.recurrent import part_bytes
from edgekit.contracts.token_costs import CacheFormat
from edgekit.errors import DamagedArtifact
from edgekit.model.families import model_from_config

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

TOKENS = [int(token) for token in models.tokens_of(120, seed=3)]


@pytest.fixture(scope="module")
def made() -> Model:
    return onnx_model("gemma4", "s4-g64", FAST, sequences=8)


def test_the_cache_of_shared_layers_is_stored_once(made: Model) -> None:
    engine = made.open()
    state = engine.start(made.plan.storage)
    feed(engine, state, TOKENS[:40])
    own = [layer for layer in made.plan.model.layers if layer.stores_kv]
    assert (len(own), len(made.plan.model.layers)) == (3, 6)
    segment = state.save(0, 40)
    per_token = sum(2 * layer.kv_heads * layer.head_dim * 4 for layer in own)
    assert sum(array.nbytes for array in segment.arrays) == 40 * per_token
    assert CacheFormat().kv_bytes(made.plan.model, 40, 32) == 40 * per_token
    engine.close()


def test_packed_graphs_give_the_same_bits(tmp_path: Path) -> None:
    """With more layers than a small constant could name."""
    kinds = ["sliding_attention", "full_attention"] * 6
    made = onnx_model("gemma4", level=FAST, config={"num_hidden_layers": 12, "layer_types": kinds})
    folder = tmp_path / "packed"
    folder.mkdir()
    pack(made.files, 1, 32, audit(made.plan, made.files), folder)
    assert {path.suffix for path in folder.iterdir()} == {".onnx", ".bin"}


def test_a_second_table_of_other_sizes_is_refused(made: Model) -> None:
    smaller = made.plan.model.model_copy(
        update={"per_layer_input": made.plan.model.per_layer_input.model_copy(update={"vocab_size": 159})}  # type: ignore[union-attr]
    )
    with pytest.raises(DamagedArtifact, match="does not fit its table"):
        OnnxEngine(made.plan.model_copy(update={"model": smaller}), made.files)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_segments_with_wrong_checkpoints_or_tokens_are_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaced(monkeypatch, 4)
    engine = onnx_model(family, "s4-g64", FAST).open()
    state = engine.start(engine.plan.storage)
    feed(engine, state, list(range(5, 15)))
    segment = state.save(0, 10)
    spacing = recurrent.checkpoint_tokens(engine.plan.model)
    places = sorted(segment.checkpoints)
    assert places == [*range(spacing, 10, spacing), 10]
    segment.arrays[0][0, 3] = engine.capabilities.vocabulary
    segment.write(tmp_path / "tokens")
    with pytest.raises(DamagedArtifact, match="outside the vocabulary"):
        engine.read_segment(tmp_path / "tokens")
    for name, wrong in (("before", [0, *places[1:]]), ("twice", [10, *places[1:]])):
        state.save(0, 10).write(tmp_path / name)
        old, new = json.dumps(places).encode(), json.dumps(wrong).encode()
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes().replace(old, new))
        with pytest.raises(Exception, match="checkpoints after"):
            engine.read_segment(tmp_path / name)
    engine.close()


def test_plans_count_the_recurrent_parts_of_a_step_and_the_graph_of_delta_rules() -> None:
    """Qwen3.5-0.8B has 18 delta rules with a memory of 1 MiB each."""
    model = model_from_config(QWEN_35_SMALL, "qwen", "config.json")
    part, recipe = part_bytes(model), named_recipe("s4-g32")
    load = MemoryLoad(model, recipe, "cpu", facts(recipe, False), 4096, sequences=64, kv_bits=32, chunk_tokens=512)

    def recurrent(load: MemoryLoad) -> int:
        return next(term.bytes for term in memory_terms(load._replace(is_open=True)) if "recurrent parts" in term.why)

    assert recurrent(load._replace(sequences=1)) == recurrent(load._replace(sequences=4)) == part > 18 << 20
    assert recurrent(load) > 10 * part  # a step of all takes more than a prompt
    attending = model.model_copy(update={"layers": (model.layers[3],) * 24})
    with_rules, without = (
        total(memory_terms(load._replace(model=each)), "runtime_bytes") for each in (model, attending)
    )
    assert with_rules - without == 18 << 20


def test_opening_copies_a_slice_of_the_head_and_nothing_where_edgekit_packs() -> None:
    model, recipe = model_from_config(QWEN_35_SMALL, "qwen", "config.json"), named_recipe("s4-g32")
    model = model.model_copy(update={"layers": (model.layers[3],) * 4})
    opening = []
    for own in (True, False):
        known = facts(recipe, False, own).model_copy(update={"tokenizer_bytes": 0, "tokenizer_reading_bytes": 0})
        load = MemoryLoad(model, recipe, "cpu", known, 64, sequences=1, kv_bits=32, chunk_tokens=64)
        opening.append(total(memory_terms(load), "opening_bytes"))
    assert opening[0] < opening[1] < 64 << 20


def test_damaged_graphs_are_refused_before_reading(tmp_path: Path) -> None:
    plan, *_ = onnx_model("llama").copied(tmp_path)
    (tmp_path / "out/weights.bin").write_bytes(b"")
    assert measured.refused(lambda: list(OnnxTarget().weights(plan, tmp_path / "out")))


@pytest.mark.skipif(sys.platform != "linux", reason="counts the files of this process in /proc")
def test_reading_back_maps_a_file_once_and_keeps_none_open(tmp_path: Path) -> None:
    plan, *_ = onnx_model("llama").copied(tmp_path)
    list(OnnxTarget().weights(plan, tmp_path / "out"))  # what is imported and opened once
    gc.collect()
    gc.disable()  # so that nothing in a cycle is freed by chance
    try:
        before = open_files()
        found = OnnxTarget().weights(plan, tmp_path / "out")
        next(found)
        assert open_files() <= before + 1
        list(found)
        assert open_files() == before
    finally:
        gc.enable()


def test_self_check_without_engine_reads_weights_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _, weights, _ = onnx_model("llama").copied(tmp_path)
    monkeypatch.setattr(OnnxTarget, "missing", lambda target: "not installed here")
    found = self_check(OnnxTarget(), plan, weights, tmp_path / "out", models.quiet).summary
    assert found == "packed-only: 22 quantised matrices read back bit for bit; not run: not installed here"
    data = bytearray((tmp_path / "out/weights.bin").read_bytes())
    data[100] ^= 0x10
    (tmp_path / "out/weights.bin").write_bytes(bytes(data))
    said = measured.refused(lambda: self_check(OnnxTarget(), plan, weights, tmp_path / "out", models.quiet))
    assert "was packed wrongly" in said
