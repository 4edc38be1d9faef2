"""Every target computes what transformers computes, and its weights read back equal the neutral ones, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
from engines import apart, make_model, row

from edgekit.contracts.engine import Chunk
from edgekit.plugins import load_target
from edgekit.testing import check_weights

SPECIAL = (*models.RECURRENT, *models.SHARING, *models.EXPERTS, *models.HYBRID_EXPERTS)
LOGITS = [row(target, family, "s4-g32", 1e-5) for target in ("onnx", "mlx") for family in models.EVERY]
LOGITS += [row("executorch", "hunyuan", "float32", 1e-4)]
for each in ("llama", "gemma3", "phi3"):
    LOGITS += [row("llamacpp", each, "float32", 0.01), row("llamacpp", each, "s4-g32", 0.08)]
TEXTS = [row(target, family) for target in ("onnx", "mlx") for family in models.TWISTED]
for each in models.TWISTED:  # whose lowering takes seconds on executorch
    TEXTS += [row("executorch", each, marks=() if each in ("hunyuan", "cohere2") else (pytest.mark.long,))]
TEXTS += [row(target, family) for target in ("onnx", "mlx") for family in SPECIAL]


@pytest.mark.parametrize(("target", "family", "recipe", "allowed"), LOGITS)
def test_logits_equal_transformers(target: str, family: str, recipe: str, allowed: float) -> None:
    """A prompt, a chunk, then token by token, beyond every window."""
    options: dict[str, Any] = {"exits": (1,)} if target == "onnx" and family in models.FAMILIES else {}
    options |= {"kv_bits": 32} if target == "llamacpp" else {}
    options |= {"context": 64} if target == "onnx" else {}
    made, tokens = make_model(target, family, recipe, **options), models.tokens_of(100 if target == "mlx" else 60)
    engine, found = made.open(), []
    state = engine.start(engine.plan.storage)
    for size in (16, 16, 8, *[1] * (len(tokens) - 40)):
        start = state.length
        found.append(engine.forward([Chunk(state, tokens[start : start + size], size)])[0])
    engine.close()
    assert apart(np.concatenate(found), made.logits(tokens)) < allowed


@pytest.mark.parametrize(("target", "family"), TEXTS)
def test_greedy_texts_equal_transformers_for_64_tokens(
    target: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    quantised = target == "onnx" and family in models.HYBRID_EXPERTS
    made = make_model(target, family, "s4-g32" if quantised else "float32")
    engine = made.open()
    text = models.greedy_text(engine, engine.start(engine.plan.storage), models.tokens_of(20, seed=3), first=13)
    engine.close()
    assert len(text) == 84
    assert text[20:] == [int(row.argmax()) for row in made.logits(text)[19:-1]]


READ_BACK = [("onnx", family, "s4-g32") for family in models.EVERY]
READ_BACK += [
    ("onnx", "llama", "s8"),
    ("onnx", "llama", "float32"),
    ("onnx", "gemma3", "float16"),
    ("onnx", "phi3", "s8"),
]
MLX = [
    ("llama", "s4-g32"), ("llama untied, with biases", "s4-g64"), ("qwen3", "s8"), ("phi3", "float16"),
    ("gemma3", "s4-g128"), ("lfm2, five taps, with biases", "s4-g64"), ("qwen3_5", "s8"), ("gpt_oss", "s4-g32"),
    ("lfm2_moe", "s8"), ("lfm2_moe", "s4-g32"), ("mixtral", "float32"),
]  # fmt: skip
EXECUTORCH = [
    ("llama untied, with biases", "s8", {"layers": 1}),
    ("phi3", "s4-g32", {"layers": 1}),  # one matrix for queries, keys and values, one for gate and up
    ("gemma3", "float32", {}),  # norms of heads and after blocks, each with an offset
    ("gemma2", "float32", {}),
    ("qwen2", "s4-g32", {"exits": (1,)}),
]


@pytest.mark.parametrize(
    ("target", "family", "recipe", "options"),
    [row(*each, {}) for each in READ_BACK]
    + [row("mlx", *each, {"backend": backend}) for each in MLX for backend in ("cpu", "metal")]
    + [row("executorch", *each) for each in EXECUTORCH],
)
def test_weights_equal_neutral_weights(target: str, family: str, recipe: str, options: dict[str, object]) -> None:
    made = make_model(target, family, recipe, **options)
    check_weights(load_target(target), made.plan, made.files, made.weights)
