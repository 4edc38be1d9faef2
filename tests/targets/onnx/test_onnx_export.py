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
from engines import apart, fed, onnx_model

from edgekit.contracts.recipe import Format, Recipe, Rule
from edgekit.errors import Unsupported

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

TOKENS = list(models.tokens_of(40))
S4, S8 = Format(kind="s4", group=32), Format(kind="s8")


def recipe_of(name: str, formats: dict[str, Format]) -> Recipe:
    return Recipe(name=name, rules=tuple(Rule(pattern=pattern, format=each) for pattern, each in formats.items()))


S4_THROUGHOUT = recipe_of("s4-throughout", {"*": S4})
S8_EMBEDDING_S4_HEAD = recipe_of("s4-head", {"*embed_tokens*": S8, "*": Format(kind="s4", group=64)})
MIXED_IN_ONE_LAYER = recipe_of(
    "mixed", {"*embed_tokens*": S8, "*.q_proj": S8, "*.v_proj": Format(kind="float16"), "*": S4}
)


def exported(family: str, recipe: Recipe | str = "s4-g32", level: int = EXACT, **plan: Any) -> tuple[OnnxEngine, Any]:
    """An engine on a model's files, and the reference."""
    made = onnx_model(family, recipe, level, **{"chunk_tokens": 64, **plan})
    return made.open(), made.reference()


def engine_logits(engine: OnnxEngine, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logits of every token: half as one prefill, then a chunk, then one by one."""
    half, chunk = len(tokens) // 2, len(tokens) // 5
    return fed(engine, engine.start(engine.plan.storage), tokens, [half, chunk, *[1] * (len(tokens) - half - chunk)])


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


PADDED_ROWS = {"hidden_size": 40, "head_dim": 16, "intermediate_size": 72, "tie_word_embeddings": False}
CLOSE: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "long factors beyond the trained context": ("phi3 with longrope", "s4-g32", {"context": 128}, 1e-5),
    "rounded activations": ("llama", "s4-g32", {"level": FAST}, 0.1),  # with 64 hidden values, the worst case
    "a cache of 16 bits": ("llama", "s4-g32", {"kv_bits": 16}, 2e-3),
    "rows that are padded": ("llama", "s8", {"config": PADDED_ROWS}, 1e-5),
}


@pytest.mark.parametrize("case", CLOSE)
def test_other_exports_are_as_close_as_they_can_be(case: str) -> None:
    family, recipe, options, most = CLOSE[case]
    engine, reference = exported(family, recipe, **options)
    tokens = list(models.tokens_of(100 if "context" in options else 40))
    error = apart(engine_logits(engine, tokens), models.logits_of(reference, tokens))
    assert (1e-4 if "level" in options else 0) < error < most
    engine.close()


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
    bodies = [f"body-{layer}-{layer + 1}.onnx" for layer in range(3)]
    assert names == [*bodies, "head.onnx", "kv-steps.safetensors", "weights.bin"]
