"""Every target computes what transformers computes, with LoRA too, and reads the neutral weights back bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
from engines import apart, make_model, row

from edgekit.contracts.engine import Chunk
from edgekit.errors import InvalidInput, Unsupported
from edgekit.model.lora import LoraAdapter, read_adapter
from edgekit.plugins import load_target
from edgekit.quant.reference_decoder import logits as reference_logits
from edgekit.testing import check_weights, write_adapter

SPECIAL = (*models.RECURRENT, *models.SHARING, *models.EXPERTS, *models.HYBRID_EXPERTS)
LOGITS = [row(target, family, "s4-g32", 1e-5) for target in ("onnx", "mlx") for family in models.EVERY]
LOGITS += [row("executorch", "hunyuan", "float32", 1e-4)]
for each in ("llama", "gemma3", "phi3"):
    LOGITS += [row("llamacpp", each, "float32", 0.01), row("llamacpp", each, "s4-g32", 0.08)]
# One family of each kind: the logits of all are compared token by token in 4 bits.
USUAL = ("hunyuan", "cohere2", *(next(iter(each)) for each in (models.RECURRENT, models.SHARING, models.EXPERTS)))
TEXTS = [
    row(target, family, marks=() if family in USUAL else (pytest.mark.long,))
    for target, families in {
        "onnx": (*models.TWISTED, *SPECIAL), "mlx": (*models.TWISTED, *SPECIAL), "executorch": models.TWISTED,
    }.items()
    for family in families
]  # fmt: skip
TOKENS = list(models.tokens_of(40))
ADAPTED = [(target, family, 1e-3) for target in ("onnx", "mlx") for family in models.EVERY]
ADAPTED += [("llamacpp", family, 0.01) for family in ("llama", "gemma3")]


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


@pytest.mark.parametrize(("target", "family"), [row("onnx", "llama"), row("mlx", "qwen3"), row("executorch", "qwen2")])
def test_an_early_exit_has_the_logits_of_the_first_layers_and_is_rewound_before_all_else(
    target: str, family: str
) -> None:
    import torch

    made, tokens = make_model(target, family, **({} if target == "mlx" else {"exits": (1,)})), models.tokens_of(12)
    engine, model = made.open(), made.plan.model
    state = engine.start(engine.plan.storage)
    found = engine.forward([Chunk(state, tokens, 12, 1)])[0]
    first = model.model_copy(update={"layers": model.layers[:1]})
    wanted = reference_logits(first, lambda name: torch.from_numpy(np.array(made.weights.tensor(name))), tokens)
    assert apart(found, wanted.numpy()) < (0.15 if target == "executorch" else 1e-5)
    for refused in (lambda: state.evict(0, 12), lambda: state.save(0, 12)):
        with pytest.raises(InvalidInput):
            refused()
    with pytest.raises(InvalidInput, match="early exit"):
        engine.forward([Chunk(state, [5], 1)])
    engine.close()


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
    (
        "gemma3",
        "float32",
        {"config": {"vocab_size": 512}, "kv_bits": 32},
    ),  # norms of heads and after blocks, each with an offset
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


def adapted_reference(reference: Any, adapter: LoraAdapter) -> Any:
    """A copy of a transformers model whose linears are `W + B·A·scale`."""
    import torch

    model = copy.deepcopy(reference)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for module, part in adapter.modules.items():
            weights[f"{module}.weight"].add_(torch.from_numpy(part.b @ part.a))
    return model


@pytest.mark.parametrize(("target", "family", "allowed"), [row(*each) for each in ADAPTED])
def test_logits_equal_torch(
    target: str, family: str, allowed: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    context = 48 if "longrope" in family else 128  # short factors, as torch takes for so short a text
    options = {"exits": (1,)} if target == "onnx" and family in models.FAMILIES else {}
    recipe, bits = ("float32", {"kv_bits": 32}) if target == "llamacpp" else ("s4-g32", {})
    made = make_model(target, family, recipe, adapter_rank=8, context=context, chunk_tokens=64, **options, **bits)
    scaled = {"config": {"use_rslora": True}} if target == "onnx" else {"config": {"lora_alpha": 16}}
    place = write_adapter(tmp_path / "tone", made.plan.model, **scaled)
    adapter, reference = read_adapter(place, made.plan.model), made.reference()
    plain, expected = (
        models.logits_of(reference, TOKENS),
        models.logits_of(adapted_reference(reference, adapter), TOKENS),
    )
    assert apart(plain, expected) > 0.02, "the adapter changes nothing"
    engine = made.open()
    values = sum(part.a.size + part.b.size for part in adapter.modules.values())
    assert engine.load_adapter("tone", place) >= values * 4 or target == "llamacpp"
    first, bare, third = (
        engine.start(made.plan.storage.model_copy(update={"adapter": name})) for name in ("tone", None, "tone")
    )
    found, base = engine.forward([Chunk(first, TOKENS[:30], 30), Chunk(bare, TOKENS[:30], 30)])
    assert apart(found, expected[:30]) < allowed, "prefill"
    assert apart(base, plain[:30]) < allowed, "the base with it"
    engine.forward([Chunk(third, TOKENS[:30], 0)])
    for step, token in enumerate(TOKENS[30:34], 30):
        found, base, again = engine.forward([Chunk(state, [token], 1) for state in (first, bare, third)])
        assert apart(base, plain[step : step + 1]) < allowed, "the base with them"
        for rows in (found, again):
            assert apart(rows, expected[step : step + 1]) < allowed, "decode"
    engine.close()


@pytest.mark.parametrize(("target", "planned", "rank"), [row("onnx", 0, 4), row("onnx", 2, 4), row("mlx", 0, 8)])
def test_an_adapter_without_planned_rank_is_refused(tmp_path: Path, target: str, planned: int, rank: int) -> None:
    made = make_model(target, "llama", adapter_rank=planned)
    engine = made.open()
    with pytest.raises(Unsupported, match="export it again with --adapter-rank"):
        engine.load_adapter("tone", write_adapter(tmp_path / "tone", made.plan.model, rank=rank))
    engine.close()
