"""LoRA on ONNX Runtime: logits equal torch with the same adapter, in any batch, and base requests are unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
import tiny_models
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import FAST
from edgekit_onnx.memory import ADAPTED_LINEAR_BYTES, DERIVING_BYTES
from engines import Model, apart, onnx_model

import edgekit
from edgekit.artifact.export import ExportOptions, export as export_artifact
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.contracts.plan import Quantisation
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import InvalidInput, UnknownName, Unsupported
from edgekit.model.lora import adaptable, read_adapter
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.testing import write_adapter

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]


def adapted(made: Model, adapter: str | None) -> KVCacheConfig:
    return made.plan.storage.model_copy(update={"adapter": adapter})


@pytest.fixture(scope="module")
def llama() -> Model:
    return onnx_model("llama", "s4-g32", FAST, exits=(1, 2), adapter_rank=8)


def test_adapters_and_base_in_one_call_are_independent(tmp_path: Path, llama: Model) -> None:
    """One of the adapters changes queries and values alone, with another rank."""
    engine = llama.open()
    engine.load_adapter("broad", write_adapter(tmp_path / "broad", llama.plan.model, seed=1, rank=8))
    narrow = write_adapter(
        tmp_path / "narrow", llama.plan.model, seed=2, rank=3, only=lambda module: module.endswith(("q_proj", "v_proj"))
    )
    engine.load_adapter("narrow", narrow)
    prompts = [list(models.tokens_of(9, seed=seed)) for seed in range(4)]
    names = ["broad", "narrow", None, "broad"]
    alone = []
    for name, prompt in zip(names, prompts, strict=True):
        state = engine.start(adapted(llama, name))
        engine.forward([Chunk(state, prompt, 0)])
        alone.append([engine.forward([Chunk(state, [token], 1)])[0] for token in (5, 6, 7)])
        state.close()
    states = [engine.start(adapted(llama, name)) for name in names]
    engine.forward([Chunk(state, prompt, 0) for state, prompt in zip(states, prompts, strict=True)])
    for step, token in enumerate((5, 6, 7)):
        together = engine.forward([Chunk(state, [token], 1) for state in states])
        for found, expected in zip(together, alone, strict=True):
            assert apart(found, expected[step]) < 1e-5
    assert apart(alone[0][0], alone[2][0]) > 0.02
    engine.close()


def test_base_is_bitwise_equal_beside_adapters(tmp_path: Path, llama: Model) -> None:
    tokens = list(models.tokens_of(12))
    answers = []
    for loads in (False, True):
        engine = llama.open()
        if loads:
            engine.load_adapter("tone", write_adapter(tmp_path / "tone", llama.plan.model))
        state = engine.start(adapted(llama, None))
        answers.append(engine.forward([Chunk(state, tokens, 12)])[0])
        engine.close()
    assert np.array_equal(*answers)


def test_exit_is_verified_with_its_adapter(tmp_path: Path, llama: Model) -> None:
    engine = llama.open(exact=True)
    engine.load_adapter("tone", write_adapter(tmp_path / "tone", llama.plan.model))
    prompt, drafted = list(models.tokens_of(9)), [4, 5, 6]
    plain = engine.start(adapted(llama, "tone"))
    engine.forward([Chunk(plain, prompt, 0)])
    expected = engine.forward([Chunk(plain, [3, *drafted], 4)])[0]
    state = engine.start(adapted(llama, "tone"))
    engine.forward([Chunk(state, prompt, 0)])
    for token in (3, 4, 5):
        engine.forward([Chunk(state, [token], 1, 1)])
    state.rewind(3)
    assert np.array_equal(engine.forward([Chunk(state, [3, *drafted], 4)])[0], expected)
    engine.close()


def test_adapter_in_use_cannot_be_dropped(tmp_path: Path, llama: Model) -> None:
    engine = llama.open()
    place = write_adapter(tmp_path / "tone", llama.plan.model)
    taken = engine.load_adapter("tone", place)
    assert taken > read_adapter(place, llama.plan.model).parameters * 4, "the weights are copied: nothing was sealed"
    with pytest.raises(InvalidInput, match="loaded already"):
        engine.load_adapter("tone", place)
    state = engine.start(adapted(llama, "tone"))
    engine.forward([Chunk(state, [3, 4], 1)])
    with pytest.raises(InvalidInput, match="in use"):
        engine.drop_adapter("tone")
    state.close()
    engine.drop_adapter("tone")
    with pytest.raises(UnknownName, match="tone"):
        engine.start(adapted(llama, "tone"))
    with pytest.raises(UnknownName, match="tone"):
        engine.drop_adapter("tone")
    engine.close()


def test_segments_belong_to_one_adapter(tmp_path: Path, llama: Model) -> None:
    engine = llama.open()
    engine.load_adapter("one", write_adapter(tmp_path / "one", llama.plan.model, seed=1))
    engine.load_adapter("two", write_adapter(tmp_path / "two", llama.plan.model, seed=2))
    state = engine.start(adapted(llama, "one"))
    engine.forward([Chunk(state, [3, 4, 5], 0)])
    state.save(0, 3).write(tmp_path / "kept")
    segment = engine.read_segment(tmp_path / "kept")
    for name in ("two", None):
        other = engine.start(adapted(llama, name))
        with pytest.raises(InvalidInput, match="not saved by this model"):
            other.restore(segment)
    again = engine.start(adapted(llama, "one"))
    again.restore(segment)
    engine.close()


def test_weights_whose_inputs_awq_scaled_take_no_adapter(tmp_path: Path, llama: Model) -> None:
    plan = llama.plan.model_copy(update={"quantisation": Quantisation(method="awq")})
    engine = OnnxEngine(plan, llama.files)
    with pytest.raises(Unsupported, match="awq scaled the inputs that adapters read"):
        engine.load_adapter("tone", write_adapter(tmp_path / "tone", plan.model))
    engine.close()
    for refused, method in ((llama.plan, "awq"), (plan, None)):
        with pytest.raises(Unsupported, match="--adapter-rank 8: awq scaled the inputs"):
            export_artifact(refused, tmp_path / "art", ExportOptions(method=method), source=open_source(llama.folder))
    assert not (tmp_path / "art").exists()


def test_adapter_text_is_independent_of_drafts_and_batches(tmp_path: Path) -> None:
    """With a sealed, packed artifact, whose second session maps the weights of the first."""
    model = tiny_models.write_tiny(tmp_path / "tiny")
    wish = PlanRequest(
        recipe=named_recipe("s4-g32"), target="onnx", context=256, sequences=3, exits=(1,), adapter_rank=8
    )
    artifact = export_artifact(make_plans(str(model), [tiny_models.DEVICE], wish)[0], tmp_path / "art")
    place = write_adapter(tmp_path / "tone", artifact.plan.model, rank=8)
    prompt, texts = list(models.tokens_of(40, 200)), {}
    for draft in ("off", "early-exit", "ngram"):
        with edgekit.open(artifact.folder, exact=True, draft=draft, prefixes=1 << 22) as runtime:
            runtime.load_adapter("tone", place)
            sessions = ADAPTED_LINEAR_BYTES * len(adaptable(artifact.plan.model)) + DERIVING_BYTES
            assert sessions < runtime.adapters["tone"] < sessions + (1 << 18), "the weights were copied"
            found = [runtime.complete(prompt, max_tokens=30, ignore_eos=True, adapter="tone").tokens for _ in range(2)]
            streams = [runtime.submit(prompt, max_tokens=30, ignore_eos=True, adapter=name) for name in ("tone", None)]
            together = [stream.answer().tokens for stream in streams]
            assert found[0] == found[1] == together[0] != together[1]
            texts[draft] = found[0]
    assert len({tuple(tokens) for tokens in texts.values()}) == 1
