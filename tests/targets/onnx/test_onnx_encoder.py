"""Encoders on onnx equal transformers in float, alone and in batches; decoders embed by the same call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_encoders import WORDS, hidden_states, unit, write_bert, write_modules
from tiny_models import DEVICE, artifact_of, write_tiny

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.contracts.engine import Chunk
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import RECIPES, named_recipe
from edgekit.errors import ContextExceeded, DamagedArtifact, DoesNotFit, InvalidInput, TargetFailed, Unsupported
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target

pytestmark = pytest.mark.quantize


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="module")
def exact(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(bert, tmp_path_factory.mktemp("exact") / "a", "float32", context=64)


def texts(count: int, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, int(draw.integers(1, 50)))).replace(" ##", "") for _ in range(count)]


def test_a_plan_has_no_cache_and_takes_eight_bits(bert: Path) -> None:
    plan = edgekit.plan(str(bert), "laptop-x86-16gb")
    assert (plan.target, plan.backend, plan.recipe.name) == ("onnx", "cpu", "s8")
    assert plan.estimate.kv_bytes == 0 and plan.context == plan.chunk_tokens == 64
    others = {each.target: each.reason for each in plan.rejected if each.target != "onnx"}
    assert {"executorch", "llamacpp"} <= others.keys()
    assert all("offer" in reason for reason in others.values())
    assert Plan.model_validate_json(plan.to_json()) == plan


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_equal_transformers(bert: Path, exact: Path, pooling: Any) -> None:
    with edgekit.open(exact) as runtime:
        given = texts(30)
        tokens = [runtime.encode(text) for text in given]
        states = hidden_states(bert, tokens)
        expected = unit(np.stack([each.mean(0) if pooling == "mean" else each[0] for each in states]))
        vectors = runtime.embed(given, pooling=pooling)
        assert runtime.metrics().steps < len(given), "texts did not run together"
        assert np.abs(vectors - expected).max() < 1e-5
        if pooling == "mean":  # as its own files say
            assert (runtime.embed(given) == vectors).all()
        alone = np.concatenate([runtime.embed([text], pooling=pooling) for text in given])
        assert np.abs(alone - vectors).max() < 1e-5


def test_prompts_are_put_before_texts(exact: Path) -> None:
    with edgekit.open(exact) as runtime:
        with_prompt = runtime.embed(["dog ran"], prompt="query")
        assert (with_prompt == runtime.embed(["the cat dog ran"])).all()
        assert (runtime.embed(["dog ran"], prompt="document") == runtime.embed(["dog ran"])).all()


def test_long_texts_are_refused_or_cut_before_the_last_special_token(exact: Path) -> None:
    with edgekit.open(exact) as runtime:
        long = "the cat sat on " * 30
        with pytest.raises(ContextExceeded, match="122 tokens"):
            runtime.embed([long])
        tokens = runtime.encode(long)
        cut = runtime.embed([[*tokens[:63], tokens[-1]]])
        assert (runtime.embed([long], truncate=True) == cut).all()


def test_eight_bits_keep_the_direction(bert: Path, exact: Path, tmp_path: Path) -> None:
    artifact = artifact_of(bert, tmp_path / "s8", "s8", context=64)
    with edgekit.open(exact) as one, edgekit.open(artifact) as other:
        given = texts(12)
        assert (one.embed(given) * other.embed(given)).sum(1).min() > 0.98
    plan = open_artifact(artifact).plan
    found = {name: values.shape for name, values in load_target("onnx").weights(plan, artifact)}
    assert found == {tensor.name: tensor.shape for tensor in plan.model.tensors()}


def test_unsupported_calls_of_an_encoder_are_refused_by_name(exact: Path, bert: Path, tmp_path: Path) -> None:
    with edgekit.open(exact) as runtime:
        with pytest.raises(Unsupported, match="generate: this model is an encoder"):
            runtime.generate("the cat")
        engine = runtime.engine
        state = engine.start(runtime.kv_config)
        with pytest.raises(Unsupported, match="no logits"):
            engine.forward([Chunk(state, [2, 3], 1)])
        state = engine.start(runtime.kv_config)
        engine.forward([Chunk(state, [2, 3], 2, hidden=True)])
        with pytest.raises(InvalidInput, match="reads a text whole"):
            engine.forward([Chunk(state, [2, 3], 2, hidden=True)])
    with pytest.raises(Unsupported, match="exact"):
        edgekit.open(exact, exact=True)
    with pytest.raises(DoesNotFit, match="private memory are needed"):
        edgekit.open(exact, memory="20MiB")
    for name in ("mlx", "llamacpp", "executorch"):
        with pytest.raises((Unsupported, DoesNotFit), match=r"encoder|nothing to offer"):
            make_plans(str(bert), [DEVICE], PlanRequest(target=name, recipe=named_recipe("s8")))
    for recipe, options in (("s8", {"method": "gptq", "calibrate": "default"}), ("balanced", {})):
        with pytest.raises(Unsupported, match="is an encoder, which is rounded to the nearest"):
            edgekit.quantize(str(bert), RECIPES[recipe], tmp_path / "out", **options)


def test_an_encoder_is_interrupted(exact: Path) -> None:
    with edgekit.open(exact) as runtime:
        engine: Any = runtime.engine
        state = engine.start(runtime.kv_config)
        engine._options.terminate()  # not `interrupt`, after which no call reaches onnxruntime
        with pytest.raises(TargetFailed, match="terminate flag"):
            engine.forward([Chunk(state, [2, 3], 2, hidden=True)])


def test_a_graph_of_another_kind_is_refused(exact: Path, tmp_path: Path) -> None:
    import shutil

    import onnx

    copy = tmp_path / "copy"
    shutil.copytree(exact, copy)
    graph = onnx.load_model(copy / "encoder.onnx", load_external_data=False)
    graph.graph.node[5].op_type = "Loop"
    (copy / "encoder.onnx").write_bytes(graph.SerializeToString())
    plan = open_artifact(exact).plan
    with pytest.raises(DamagedArtifact, match="uses the operator"):
        load_target("onnx").open(plan, copy)


def test_decoders_embed_by_their_last_token(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "qwen", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    write_modules(folder, "", steps=("Transformer", "Pooling", "Normalize"))
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    assert open_source(folder).spec.embedding is not None
    with edgekit.open(artifact_of(folder, tmp_path / "a", "float32"), sequences=2) as runtime:
        given = ["the cat sat on the mat. " * 4, "a", "naïve façade"]
        tokens: Sequence[Sequence[int]] = [runtime.encode("the cat " + text) for text in given]
        expected = unit(np.stack([each[-1] for each in hidden_states(folder, tokens)]))
        stream = runtime.submit("the cat", max_tokens=8)
        assert np.abs(runtime.embed(given, prompt="query") - expected).max() < 1e-4
        assert len(stream.answer().tokens) == 8
