"""LoRA on every target: logits equal torch with the same adapter, in any batch, with requests without one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
from engines import apart, make_model, row

from edgekit.contracts.engine import Chunk
from edgekit.errors import Unsupported
from edgekit.model.lora import LoraAdapter, read_adapter
from edgekit.testing import write_adapter

TOKENS = list(models.tokens_of(40))
ROWS = [(target, family, 1e-3) for target in ("onnx", "mlx") for family in models.EVERY]
ROWS += [("llamacpp", family, 0.01) for family in ("llama", "gemma3")]


def adapted_reference(reference: Any, adapter: LoraAdapter) -> Any:
    """A copy of a transformers model whose linears are `W + B·A·scale`."""
    import torch

    model = copy.deepcopy(reference)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for module, part in adapter.modules.items():
            weights[f"{module}.weight"].add_(torch.from_numpy(part.b @ part.a))
    return model


@pytest.mark.parametrize(("target", "family", "allowed"), [row(*each) for each in ROWS])
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
    assert engine.load_adapter("tone", place) >= adapter.parameters * 4 or target == "llamacpp"
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
