"""Exported graphs equal the dequantised weights for every family, and written weights dequantise exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx import OnnxTarget
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT, FAST
from onnx_models import onnx_model

from edgekit.contracts.engine import Chunk
from edgekit.contracts.recipe import Format, Recipe, Rule
from edgekit.errors import Unsupported

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

TOKENS = list(models.tokens_of(40))
S4_THROUGHOUT = Recipe(name="s4-throughout", rules=(Rule(pattern="*", format=Format(kind="s4", group=32)),))
S8_EMBEDDING_S4_HEAD = Recipe(
    name="s4-head",
    rules=(
        Rule(pattern="*embed_tokens*", format=Format(kind="s8")),
        Rule(pattern="*", format=Format(kind="s4", group=64)),
    ),
)
MIXED_IN_ONE_LAYER = Recipe(
    name="mixed",
    rules=(
        Rule(pattern="*embed_tokens*", format=Format(kind="s8")),
        Rule(pattern="*.q_proj", format=Format(kind="s8")),
        Rule(pattern="*.v_proj", format=Format(kind="float16")),
        Rule(pattern="*", format=Format(kind="s4", group=32)),
    ),
)


def exported(family: str, recipe: Recipe | str = "s4-g32", level: int = EXACT, **plan: Any) -> tuple[OnnxEngine, Any]:
    """An engine on a model's files, and the reference."""
    made = onnx_model(family, recipe, level, **{"chunk_tokens": 64, **plan})
    return made.open(), made.reference()


def engine_logits(engine: OnnxEngine, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logits of every token: half as one prefill, then a chunk, then one by one."""
    state = engine.start(engine.plan.storage)
    half, chunk = len(tokens) // 2, len(tokens) // 5
    found = [engine.forward([Chunk(state, tokens[:half], half)])[0]]
    found.append(engine.forward([Chunk(state, tokens[half : half + chunk], chunk)])[0])
    found += [engine.forward([Chunk(state, [token], 1)])[0] for token in tokens[half + chunk :]]
    state.close()
    return np.concatenate(found)


def apart(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    "recipe",
    ["s4-g64", "s8", "float32", "float16", S4_THROUGHOUT, S8_EMBEDDING_S4_HEAD, MIXED_IN_ONE_LAYER],
    ids=lambda recipe: recipe if isinstance(recipe, str) else recipe.name,
)
@pytest.mark.parametrize("family", ["llama untied, with biases", "gemma2"])
def test_every_recipe_equals_its_dequantised_weights(family: str, recipe: Recipe | str) -> None:
    engine, reference = exported(family, recipe)
    assert apart(engine_logits(engine, TOKENS), models.logits_of(reference, TOKENS)) < 1e-5
    engine.close()


def test_context_beyond_trained_uses_long_factors() -> None:
    engine, reference = exported("phi3 with longrope", "s4-g32", context=128)
    tokens = list(models.tokens_of(100))
    assert apart(engine_logits(engine, tokens), models.logits_of(reference, tokens)) < 1e-5
    engine.close()


def test_int8_activations_within_bound() -> None:
    """A random model with 64 hidden values is the worst case for rounding."""
    engine, reference = exported("llama", "s4-g32", level=FAST)
    error = apart(engine_logits(engine, TOKENS), models.logits_of(reference, TOKENS))
    assert 1e-4 < error < 0.1
    engine.close()


def test_float16_kv_within_bound() -> None:
    engine, reference = exported("llama", "s4-g32", kv_bits=16)
    assert apart(engine_logits(engine, TOKENS), models.logits_of(reference, TOKENS)) < 2e-3
    assert engine.state_bytes(engine.plan.storage) == 2 * 3 * 2 * 16 * 128 * 2
    engine.close()


def test_indivisible_row_is_padded() -> None:
    config = {"hidden_size": 40, "head_dim": 16, "intermediate_size": 72, "tie_word_embeddings": False}
    engine, reference = exported("llama", "s8", config=config)
    assert apart(engine_logits(engine, TOKENS), models.logits_of(reference, TOKENS)) < 1e-5
    engine.close()


@pytest.mark.parametrize("recipe", ["s4-g32", "s8"])
def test_written_weights_dequantise_exactly(recipe: str) -> None:
    """Dequantise the graphs' own initializers by the operators' definition."""
    import onnx

    made = onnx_model("qwen3", recipe, exits=(2,))
    weights = made.weights
    found: dict[str, np.ndarray[Any, Any]] = {}
    for path in made.files.glob("*.onnx"):
        graph = onnx.load(path).graph
        tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "MatMulNBits":
                options = {item.name: item.i for item in node.attribute}
                values = tensors[node.input[1]].reshape(options["N"], -1)
                if options["bits"] == 4:
                    values = np.stack([values & 15, values >> 4], axis=-1).reshape(options["N"], -1)
                raised = values.astype(np.float32) - (8 if options["bits"] == 4 else 128)
                scales = np.repeat(tensors[node.input[2]], options["block_size"], axis=1)
                found[node.input[1].removesuffix(".weight")] = (raised * scales)[:, : options["K"]]
    for module in weights.modules():
        if module.startswith("model.layers"):
            np.testing.assert_array_equal(found[module], weights.dequantised(module))
    np.testing.assert_array_equal(found["head"], weights.dequantised("lm_head"))


def test_a_plan_that_is_refused_is_not_opened(tmp_path: Path) -> None:
    weights = onnx_model("llama").weights
    with pytest.raises(Unsupported, match="kv_bits 4 is not supported"):
        OnnxTarget().open(models.plan_for(weights.model, weights.recipe, kv_bits=4), tmp_path)


@pytest.mark.parametrize(
    ("installed", "said"),
    [([], "not installed"), (["onnxruntime", "onnxruntime-gpu"], "uninstall both"), (["onnxruntime-gpu"], None)],
    ids=["none", "both", "one"],
)
def test_missing_names_the_fix(monkeypatch: pytest.MonkeyPatch, installed: list[str], said: str | None) -> None:
    monkeypatch.setattr("edgekit_onnx.version_of", lambda name: "1" if name in installed else None)
    found = OnnxTarget().missing()
    assert found is None if said is None else said in (found or "")


def test_export_writes_only_its_files() -> None:
    names = sorted(path.name for path in onnx_model("llama", exits=(1, 2)).files.iterdir())
    assert names == [
        "body-0-1.onnx",
        "body-1-2.onnx",
        "body-2-3.onnx",
        "head.onnx",
        "kv-steps.safetensors",
        "weights.bin",
    ]
