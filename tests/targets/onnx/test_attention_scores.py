"""Windows that keep tokens by attention: its weights, what the engine opens for it, and texts cut in any way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx.export import EXACT, FAST
from engines import Model, onnx_model

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.enginekit.keeping import ATTENTION, CACHE, scorers_for
from edgekit.errors import Unsupported
from edgekit.testing import check_engine, write_adapter
from edgekit.testing.check_keeping import check_kept_tokens_depend_on_the_text
from edgekit.testing.judging import Judge

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

BY_ATTENTION = KVEvictionPolicy.of(48, 4, "snapkv")


@pytest.fixture(scope="module")
def llama() -> Model:
    return onnx_model("llama", "float32", EXACT, exits=(1,))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "gpt_oss"])
def test_weights_are_those_of_transformers(family: str) -> None:
    """Also in layers with a window, with norms of heads, and with sinks, which take a share of them."""
    import torch
    from transformers import AutoModelForCausalLM

    made = onnx_model(family, "float32", EXACT)
    tokens, newest = list(models.tokens_of(40)), 24
    reference = AutoModelForCausalLM.from_pretrained(made.folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens]), output_attentions=True).attentions
    engine = made.open(cache=BY_ATTENTION)
    state = engine.start(engine.plan.storage)
    for start in range(0, 40, 16):
        engine.forward([Chunk(state, tokens[start : start + 16], 0)])
    found = list(state._attention(tokens[-newest:]))
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs[0, :, -newest:].sum(1).numpy(), atol=2e-4)
    engine.close()


def test_scoring_leaves_a_state_as_it_is(llama: Model) -> None:
    """In fast mode too, where the same tokens in one call and in several are not bitwise the same."""
    tokens = list(models.tokens_of(40))
    engine = llama.open(cache=BY_ATTENTION)
    state = engine.start(engine.plan.storage)
    for token in tokens:
        engine.forward([Chunk(state, [token], 1)])
    before = state.save(0, 40)
    scores = {name: state.scores(name, 4, tokens[-16:]) for name in engine.capabilities.scorers}
    assert (state.position, state.length) == (40, 40)
    for one, other in zip(before.arrays, state.save(0, 40).arrays, strict=True):
        np.testing.assert_array_equal(one, other)
    for name, found in scores.items():
        assert found.shape == (36,)
        np.testing.assert_array_equal(found, state.scores(name, 4, tokens[-16:]))
    engine.close()


def test_only_a_window_by_attention_opens_graphs_that_give_it(llama: Model) -> None:
    for policy in (KVEvictionPolicy(), KVEvictionPolicy.of(48, 4, "scored")):
        engine = llama.open(cache=policy)
        state = engine.start(engine.plan.storage)
        engine.forward([Chunk(state, [5, 6, 7], 0)])
        assert engine.capabilities.scorers == scorers_for(CACHE)
        assert engine.capabilities.scorers_on_request == scorers_for(ATTENTION)
        assert state.table.attention is None
        with pytest.raises(Unsupported, match="no attention to score by snapkv"):
            state.scores("snapkv", 0, [7])
        engine.close()
    engine = llama.open(cache=BY_ATTENTION)
    assert engine.capabilities.scorers == scorers_for(CACHE, ATTENTION)
    engine.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "hunyuan"])
def test_kept_tokens_depend_on_the_text_alone(family: str) -> None:
    """Bitwise in exact mode, under every scorer: chunks, and windows saved and restored."""
    made = onnx_model(family, "s4-g64", FAST)
    engine = made.open(exact=True, cache=BY_ATTENTION)
    check_kept_tokens_depend_on_the_text(engine, Judge(True, 0, True, 1, False))
    engine.close()


@pytest.mark.parametrize("kv_bits", [32, 16])
def test_the_suite_passes_with_scorers_by_attention(kv_bits: int) -> None:
    made = onnx_model("llama", "s4-g64", EXACT, kv_bits=kv_bits)
    check_engine(
        lambda: made.open(cache=BY_ATTENTION), exact=False, tolerance=1e-5 if kv_bits == 32 else 5e-3, sequences=20
    )


def test_an_adapter_changes_the_attention(tmp_path: Path) -> None:
    made = onnx_model("llama", "s4-g64", FAST, adapter_rank=4)
    tokens = list(models.tokens_of(16))
    engine = made.open(cache=BY_ATTENTION)
    engine.load_adapter("tone", write_adapter(tmp_path / "tone", made.plan.model, seed=1, rank=4))
    found = []
    for name in (None, "tone"):
        state = engine.start(made.plan.storage.model_copy(update={"adapter": name}))
        engine.forward([Chunk(state, tokens, 0)])
        found.append(np.stack(list(state._attention(tokens[8:]))))
        np.testing.assert_allclose(found[-1].sum(axis=2), 8, rtol=1e-4)
        state.close()
    assert np.abs(found[0] - found[1]).max() > 1e-3
    engine.drop_adapter("tone")
    engine.close()


def test_layers_that_share_a_cache_are_left_out() -> None:
    made = onnx_model("gemma4", "s4-g64", FAST)
    tokens = list(models.tokens_of(40))
    engine = made.open(cache=BY_ATTENTION)
    state = engine.start(engine.plan.storage)
    engine.forward([Chunk(state, tokens[:16], 0)])
    found = list(state._attention(tokens[8:16]))
    assert len(found) == sum(layer.stores_kv for layer in engine.plan.model.layers) < len(engine.plan.model.layers)
    for weights in found:
        np.testing.assert_allclose(weights.sum(axis=1), 8, rtol=1e-4)
    engine.close()
