"""Models with a recurrent part (LFM2, Qwen3.5) on MLX: logits of float16, rows one by one, and memory."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("transformers")

import family_models as models
import mlx.core as mx
import mlx_models
from edgekit_mlx.convolution import Carry
from edgekit_mlx.delta_rule import gated_delta_rule
from edgekit_mlx.engine import MlxEngine
from edgekit_mlx.memory import Preparation
from edgekit_mlx.offers import offer

from edgekit.contracts import recurrent
from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed
from edgekit.model.parts import DeltaRule
from edgekit.planner.memory import cache_bytes, explain

pytestmark = [pytest.mark.mlx, pytest.mark.quantize]


HYBRIDS = ("lfm2", "lfm2_moe", "qwen3_5")
TOKENS = mlx_models.tokens_of(50)


@pytest.mark.parametrize("family", HYBRIDS)
def test_row_by_row_keeps_the_same_recurrent_part(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact mode on Metal runs row by row. Drafts that are verified so do not enter the recurrent part either."""
    monkeypatch.setattr(recurrent, "LEAST_TOKENS", 4)
    found, made = [], mlx_models.made(family, "s4-g64")
    for one_by_one in (False, True):
        engine = MlxEngine(made.plan, made.files)
        engine._one_by_one = one_by_one
        state = engine.start(engine.plan.storage)
        feed(engine, state, TOKENS[:20])
        rows = [engine.forward([Chunk(state, TOKENS[20:25], 5)])[0]]
        state.rewind(3)
        rows += [feed(engine, state, TOKENS[40:50], 10)]
        found.append(np.concatenate(rows))
        engine.close()
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("family", models.RECURRENT)
def test_float16_logits_equal_reference(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 weights, activations and caches, as on a Mac, run by the CPU's slow kernels."""
    monkeypatch.setattr("edgekit_mlx.engine.prepare", lambda plan: Preparation(True, ()))
    made, tokens = mlx_models.made(family, backend="metal", kv_bits=16), mlx_models.tokens_of(12)
    engine = MlxEngine(made.plan, made.files, exact=True)
    found = mlx_models.fed(engine, engine.start(engine.plan.storage), tokens, [5])
    engine.close()
    assert mlx_models.apart(found, mlx_models.expected(family, tokens)) < 0.03


@pytest.mark.parametrize("family", HYBRIDS)
def test_state_bytes_equal_the_plan(family: str) -> None:
    made = mlx_models.made(family, "s4-g64")
    assert "of 2 recurrent layers" in "\n".join(explain(made.plan))
    facts = offer(made.plan.model, "cpu", made.plan.recipe).memory
    engine = MlxEngine(made.plan, made.files)
    for bits in engine.capabilities.kv_bits:
        storage = mlx_models.storage(engine, bits)
        state = engine.start(storage)
        assert state.bytes == cache_bytes(made.plan.model, storage.capacity_tokens, bits, facts)
        state.close()
    engine.close()


def test_a_long_prompt_holds_few_memories() -> None:
    """The delta rule's memory takes a mebibyte here, and 64 tokens change it one after the other."""
    rule = DeltaRule(key_heads=1, value_heads=16, key_dim=128, value_dim=128, taps=2)
    sizes = {"qkv": rule.channels, "z": rule.values, "b": rule.value_heads, "a": rule.value_heads}
    others = {
        "conv1d.weight": mx.ones((rule.channels, 1, 2)), "dt_bias": mx.ones(16), "A_log": mx.zeros(16),
        "norm.weight": mx.ones(128),
    }  # fmt: skip
    run = Carry(64, 64, (mx.zeros((1, rule.channels)), mx.zeros((16, 128, 128))))
    mx.eval(others, run.arrays)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    output, after = gated_delta_rule(
        "", rule, 1e-6, lambda name, x: mx.ones((64, sizes.get(name.removeprefix("in_proj_"), 8))),
        others.__getitem__, mx.ones((64, 8)), [run],
    )  # fmt: skip
    mx.eval(output, after)
    assert mx.get_peak_memory() - before < 20 << 20
