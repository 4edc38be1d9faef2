"""Hidden states for a drafting head: those of transformers, at no cost to calls that do not ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from eagle3_heads import features_of, torch_features
from engines import apart, make_model, row
from family_models import tokens_of

from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed
from edgekit.errors import DamagedArtifact

TOKENS = list(tokens_of(40, seed=3))
HYBRIDS, FIRST, ODD = ("lfm2", "qwen3_5"), (1, 2, 3), (2, 1, 2)  # layers in another order than the model's, one twice
ROWS = [("onnx", family, FIRST, exits) for family in ("llama", "gemma2", "phi3") for exits in ((), (1,))]
ROWS += [("onnx", family, FIRST, ()) for family in (*HYBRIDS, "gemma4")]
ROWS += [("mlx", family, (1, 2, 3, 1), ()) for family in ("llama", "gemma2", "phi3", "gemma4", "qwen3_moe", *HYBRIDS)]
ROWS += [("executorch", "qwen2", ODD, ())]


@pytest.mark.parametrize(("target", "family", "head", "exits"), [row(*each) for each in ROWS])
def test_hidden_states_are_those_of_transformers(target: str, family: str, head: Any, exits: Any) -> None:
    recipe, options = ("float32", {}) if target == "executorch" else ("s4-g32", {"exits": exits} if exits else {})
    made = make_model(target, family, recipe, head=head, **options)
    engine = made.open()
    found = features_of(engine, TOKENS, [16, 1, 16, 7])
    engine.close()
    assert apart(found, torch_features(made.reference(), TOKENS, head)) < (1e-4 if target == "onnx" else 1e-5)


@pytest.mark.parametrize("target", [row("onnx"), row("executorch")])
def test_a_head_adds_outputs_alone(target: str) -> None:
    """The logits stay as they are, the weights are shared, and files without the outputs are refused."""
    family = "qwen2" if target == "executorch" else "llama"
    plain, made = make_model(target, family, exits=(1,)), make_model(target, family, exits=(1,), head=FIRST[:2])
    logits = []
    for each in (plain, made):
        engine = each.open(exact=True)
        logits.append(feed(engine, engine.start(each.plan.storage), TOKENS, 3))
        engine.close()
    np.testing.assert_array_equal(*logits)
    sizes = [sum(path.stat().st_size for path in each.files.iterdir() if path.is_file()) for each in (plain, made)]
    assert abs(sizes[1] - sizes[0]) < plain.plan.model.hidden_size**2 // 2, "as much as the smallest matrix in 4 bits"
    with pytest.raises(DamagedArtifact, match=r"has the outputs|hidden states after layers \[\]"):
        plain._replace(plan=made.plan).open()


@pytest.mark.onnx
@pytest.mark.quantize
@pytest.mark.parametrize("kv_bits", [16, 8])
def test_hidden_states_beside_a_narrow_cache(kv_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ by the cache's rounding alone, also where a call is cut into pieces."""
    engine = make_model("onnx", "llama", head=FIRST).open()
    monkeypatch.setattr("edgekit_onnx.runner.TOKENS_AT_ONCE", 5)
    wide, narrow = (features_of(engine, TOKENS[:20], [16, 4], bits) for bits in (32, kv_bits))
    engine.close()
    assert 0 < np.sqrt(np.mean((wide - narrow) ** 2)) / wide.std() <= 0.2


@pytest.mark.mlx
@pytest.mark.quantize
def test_a_gpus_exact_mode_gives_them_token_by_token_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and activations have 16 bits, as on a Mac; the CPU computes them slowly."""
    made, tokens = make_model("mlx", "llama", head=FIRST, backend="metal", kv_bits=16), TOKENS[:12]
    from edgekit_mlx.preparation import Preparation

    monkeypatch.setattr("edgekit_mlx.engine.prepare", lambda plan: Preparation(True, ()))
    engine = made.open(exact=True)
    found = features_of(engine, tokens, [12])
    np.testing.assert_array_equal(found, features_of(engine, tokens, [5, 7]))
    assert 0 < apart(found, torch_features(made.reference(), tokens, FIRST)) < 0.02
    engine.close()


@pytest.mark.mlx
@pytest.mark.quantize
def test_calls_without_a_request_compute_no_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, wanted = make_model("mlx", "llama", head=(1, 2)).open(), list[set[int]]()
    body = engine._decoder.body

    def watched(ids: Any, runs: Any, layers: Any, added: Any) -> Any:
        wanted.append(set(layers))
        return body(ids, runs, layers, added)

    monkeypatch.setattr(engine._decoder, "body", watched)
    state = engine.start(engine.plan.storage)
    engine.forward([Chunk(state, [1, 2], 1)])
    state.close()
    features_of(engine, [1, 2, 3], [3])
    assert wanted == [{3}, {1, 2, 3}]
    engine.close()


@pytest.mark.executorch
@pytest.mark.quantize
@pytest.mark.slow
def test_the_vendors_method_returns_logits_alone() -> None:
    made = make_model("executorch", "qwen2", exits=(1,), head=FIRST[:2])
    import torch
    from edgekit_executorch.export import content_key
    from edgekit_executorch.layout import FORWARD, PROGRAM
    from edgekit_executorch.program import LoadedProgram

    assert content_key(made.plan, made.weights) != content_key(
        made.plan.model_copy(update={"drafter": None}), made.weights
    )
    loaded = LoadedProgram(Path(made.files / PROGRAM), 1)
    assert loaded.features == (1, 2)
    outputs = loaded._method(FORWARD).execute([torch.tensor([TOKENS[:5]]), torch.tensor([0])])
    logits, *hidden = loaded.append(TOKENS[:5], 0, [4])
    np.testing.assert_array_equal(outputs[0].numpy(), logits)
    assert len(outputs) == 1 and [each.shape for each in hidden] == [(5, made.plan.model.hidden_size)] * 2
    loaded.close()
