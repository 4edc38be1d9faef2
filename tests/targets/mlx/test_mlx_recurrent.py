"""Models with a recurrent part (LFM2, Qwen3.5) on MLX: the suite, logits, texts, drafts, batches, states, prefixes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("transformers")

import family_models as models
import mlx.core as mx
import mlx_models
import recurrent_checks as checks
from edgekit_mlx.convolution import Carry
from edgekit_mlx.delta_rule import gated_delta_rule
from edgekit_mlx.engine import MlxEngine
from edgekit_mlx.export import export
from edgekit_mlx.memory import Preparation
from edgekit_mlx.offers import offer
from recurrent_checks import SPACING, TOKENS, RecurrentModel

from edgekit.contracts import recurrent
from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed
from edgekit.enginekit import recurrent as parts
from edgekit.model.parts import DeltaRule
from edgekit.planner.memory import cache_bytes, explain
from edgekit.testing import check_engine, write_adapter

pytestmark = [pytest.mark.mlx, pytest.mark.quantize]


@pytest.fixture(autouse=True)
def close_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "LEAST_TOKENS", SPACING)


def make(folder: Path, family: str, recipe: str, **options: Any) -> RecurrentModel:
    return RecurrentModel(folder, family, recipe, "mlx", export, MlxEngine, **options)


@pytest.fixture(scope="module", params=["lfm2", "lfm2_moe", "qwen3_5"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RecurrentModel:
    return make(tmp_path_factory.mktemp(request.param), request.param, "s4-g64", sequences=8)


@pytest.mark.parametrize("sequences", [15, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("spacing", [SPACING, 128])
def test_engine_passes_conformance_suite_bitwise(
    made: RecurrentModel, spacing: int, sequences: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "LEAST_TOKENS", spacing)
    plan = made.plan.model_copy(update={"adapter_rank": 8})
    one, two = (write_adapter(tmp_path / str(seed), plan.model, seed=seed, rank=seed) for seed in (3, 8))
    check_engine(
        lambda: MlxEngine(plan, made.files), exact=True, tolerance=0.0, sequences=sequences, adapters=(one, two)
    )  # fmt: skip


@pytest.mark.parametrize("kv_bits", [16, 8, 4])
@pytest.mark.parametrize("family", [family for family in models.RECURRENT if "biases" in family])
def test_narrow_caches_pass_conformance_suite_bitwise(
    tmp_path: Path, family: str, kv_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MOST_UNCERTAIN", 4)
    made = make(tmp_path, family, "s4-g64")
    check_engine(lambda: mlx_models.holding(made.open(), kv_bits), exact=True, tolerance=0.0, sequences=8)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_drafts_change_no_text_in_exact_mode(tmp_path: Path, family: str) -> None:
    checks.check_drafts(partial(make, tmp_path), family)


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe", "qwen3_5"])
def test_drafted_prompts_have_the_plain_texts(tmp_path: Path, family: str, count: int) -> None:
    checks.check_drafted_prompts(partial(make, tmp_path), family, count)


def test_eight_in_a_batch_equal_eight_alone(made: RecurrentModel) -> None:
    checks.check_batch_of_eight(made, 0.0)


def test_killed_state_continues_equally_in_another_process(made: RecurrentModel) -> None:
    checks.check_killed_state(made)


def test_a_prefix_hit_computes_the_suffix_and_at_most_one_gap(
    made: RecurrentModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks.check_prefix_hits(made, monkeypatch)


def test_row_by_row_keeps_the_same_recurrent_part(made: RecurrentModel) -> None:
    """Exact mode on Metal runs row by row. Drafts that are verified so do not enter the recurrent part either."""
    found = []
    for one_by_one in (False, True):
        engine = made.open()
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


def test_state_bytes_equal_the_plan(made: RecurrentModel) -> None:
    assert "of 2 recurrent layers" in "\n".join(explain(made.plan))
    facts = offer(made.plan.model, "cpu", made.plan.recipe).memory
    engine = made.open()
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
