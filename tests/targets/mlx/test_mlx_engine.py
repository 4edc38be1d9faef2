"""The mlx engine passes the conformance suite, and its logits equal the reference for every family."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("mlx.core")
pytest.importorskip("mlx")

import family_models as models
import mlx.core as mx
from edgekit_mlx import MlxTarget
from edgekit_mlx.convolution import Carry
from edgekit_mlx.decoder import Run
from edgekit_mlx.delta_rule import delta_rule
from edgekit_mlx.engine import MlxEngine
from edgekit_mlx.layout import WEIGHTS
from edgekit_mlx.memory import memory_terms
from edgekit_mlx.offers import offer, on_this_machine
from edgekit_mlx.preparation import Preparation, wired_limit
from edgekit_mlx.weights import Weights
from edgekit_mlx.worker import MlxThread
from engines import apart, fed, fed_under, mlx_model, storage_of

from edgekit.artifact.export import export
from edgekit.common.units import MIB
from edgekit.contracts import recurrent
from edgekit.contracts.engine import Chunk
from edgekit.contracts.feeding import feed
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import named_recipe
from edgekit.contracts.stored_weights import by_rows_bytes, stored_weight_bytes
from edgekit.contracts.token_costs import CacheFormat
from edgekit.device.load import load_profile
from edgekit.errors import DamagedArtifact, EdgekitError, InvalidInput, TargetFailed, TargetMissing, Unsupported
from edgekit.model.parts import DeltaRule
from edgekit.planner.make import make_plans
from edgekit.planner.memory import explain
from edgekit.planner.request import PlanRequest
from edgekit.runtime.open import open_runtime

pytestmark = [pytest.mark.mlx, pytest.mark.quantize]

WITH_WIDE_HEADS = "llama 3 rope, wide heads"
HYBRIDS = ("lfm2", "lfm2_moe", "qwen3_5")


def opened(family: str, **plan: Any) -> MlxEngine:
    made = mlx_model(family, **plan)
    return MlxEngine(made.plan, made.files)


@pytest.mark.parametrize(("bits", "allowed"), [(32, 2e-5), (16, 3e-3), (8, 0.05), (4, 0.6)])
def test_one_layer_eviction_equals_never_fed(bits: int, allowed: float) -> None:
    """After 60 evictions, logits are as close as after one."""
    engine = opened(models.ONE_LAYER)
    tokens = models.tokens_of(260)
    policy = KVEvictionPolicy(window=24, sinks=4, block=4)
    state = engine.start(storage_of(engine, bits, 24))
    found = fed_under(engine, state, tokens, policy, 4)[-1]
    kept = tokens[:4] + tokens[4 - state.length :]
    assert state.position == 260 and len(kept) == state.length
    plain = engine.start(storage_of(engine, 32, 24))
    wanted = fed(engine, plain, kept, [8])[-1]
    engine.close()
    assert apart(found, wanted) < allowed


def test_quantised_sinks_are_rounded_once() -> None:
    engine = opened(models.ONE_LAYER)
    policy = KVEvictionPolicy(window=24, sinks=4, block=1)
    state = engine.start(storage_of(engine, 4, 24))
    fed_under(engine, state, models.tokens_of(24), policy, 1)
    at_first = [np.array(original) for original in [cache.keys(0, 4) for cache in state.caches]]
    fed_under(engine, state, models.tokens_of(200, seed=9), policy, 1)
    moved = [state._rotated([cache.keys(0, 4) for cache in state.caches], -state._origin)]
    error = apart(np.array(moved[0][0]), at_first[0])
    engine.close()
    assert state.position == 224 and error < 0.2  # one step of four bits is 1/15 of a group's range


@pytest.mark.parametrize(
    ("family", "allowed"),
    [(name, 0.02) for name in ("llama untied, with biases", "phi3", "gemma2")]
    + [(name, 0.03) for name in models.RECURRENT],
)
def test_float16_logits_equal_reference(family: str, allowed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 weights, activations and caches, as on a Mac, run by the CPU's slow kernels."""
    monkeypatch.setattr("edgekit_mlx.engine.prepare", lambda plan: Preparation(True, ()))
    engine, tokens = opened(family, backend="metal", kv_bits=16), models.tokens_of(12)
    assert engine.capabilities.exact == "on_request" and engine.capabilities.kv_bits[0] == 16
    state = engine.start(engine.plan.storage)
    found = fed(engine, state, tokens, [5])
    if family not in models.RECURRENT:
        run = Run(state.caches, state.length, state.next_position, 1, {}, 0)
        hidden = engine._worker.run(lambda: engine._decoder.body([1], [run], {2})[2].dtype)
        assert hidden == (mx.float32 if family.startswith("gemma") else mx.float16)  # as Gemma's outgrows float16
    engine.close()
    assert apart(found, mlx_model(family).logits(tokens)) < allowed


@pytest.mark.parametrize("family", ["mistral with a window", "gemma2", "llama"])
def test_blocks_of_scores_are_bitwise_equal(family: str) -> None:
    tokens = models.tokens_of(100)
    found = []
    for score_bytes in (1, 4 * 4 * 70, 1 << 30):
        engine = opened(family)
        engine.score_bytes = score_bytes
        found.append(fed(engine, engine.start(engine.plan.storage), tokens, [50]))
        engine.close()
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[2])


@pytest.mark.parametrize("family", ["mistral with a window", "gemma3"])
def test_chunking_does_not_matter_beyond_windows(family: str) -> None:
    """From 64 tokens beyond a window on, attention begins at a later key, which depends on the chunk."""
    tokens, found = models.tokens_of(250), []
    for sizes in ([1], [64], [3, 50, 7]):
        engine = opened(family, context=256)
        found.append(fed(engine, engine.start(engine.plan.storage), tokens, sizes))
        engine.close()
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    assert apart(found[0], mlx_model(family).logits(tokens)) < 1e-5


def test_eviction_after_more_sinks_than_originals() -> None:
    engine, tokens = opened(models.ONE_LAYER), models.tokens_of(110)
    state = engine.start(engine.plan.storage)
    fed(engine, state, tokens[:100], [50])
    state.evict(80, 90)  # 80 tokens are turned forward, more than have originals
    state.evict(70, 72)
    state.rewind(50)  # into the first ones
    state.evict(10, 12)
    found = fed(engine, state, tokens[100:], [5])[-1]
    kept = tokens[:10] + tokens[12:38] + tokens[100:]
    plain = engine.start(engine.plan.storage)
    wanted = fed(engine, plain, kept, [23])[-1]
    engine.close()
    assert state.length == len(kept) and apart(found, wanted) < 1e-5


def test_large_positions_rotate_exactly() -> None:
    engine, tokens = opened("llama"), models.tokens_of(30)
    near = fed(engine, engine.start(engine.plan.storage), tokens, [10])
    state = engine.start(engine.plan.storage)
    state._origin = 50_000_000
    far = fed(engine, state, tokens, [10])
    engine.close()
    assert apart(far, near) < 1e-5


def test_states_of_several_widths_decode_together() -> None:
    engine = opened(WITH_WIDE_HEADS)
    widths = [32, 8, 4, 16]
    texts = [models.tokens_of(count, seed=count) for count in (5, 17, 30, 11)]
    alone = []
    for bits, text in zip(widths, texts, strict=True):
        state = engine.start(storage_of(engine, bits))
        alone.append(fed(engine, state, [*text, 9, 8, 7], [4])[-1])
        state.close()
    states = [engine.start(storage_of(engine, bits)) for bits in widths]
    engine.forward([Chunk(state, text, 0) for state, text in zip(states, texts, strict=True)])
    for place in range(len(states)):
        engine.forward([Chunk(other, [3] * (place + 1), place + 1) for other in states])
        for other in states:
            other.rewind(place + 1)
    found = engine.forward([Chunk(state, [9, 8, 7], 1) for state in states])
    engine.close()
    for one, wanted in zip(found, alone, strict=True):
        np.testing.assert_array_equal(one[-1], wanted)


@pytest.mark.parametrize("family", [models.ONE_LAYER, *HYBRIDS, "gemma4"])  # whose layers share caches, stored once
def test_state_bytes_equal_plan_and_are_freed(family: str) -> None:
    engine = opened(family)
    assert ("of 2 recurrent layers" in "\n".join(explain(engine.plan, memory_terms))) is (family in HYBRIDS)
    for bits in engine.capabilities.kv_bits:
        storage = storage_of(engine, bits)
        assert engine.state_bytes(storage) == CacheFormat().state_bytes(
            engine.plan.model, storage.capacity_tokens, bits
        )
        before = mx.get_active_memory()
        state = engine.start(storage)
        assert mx.get_active_memory() - before == pytest.approx(engine.state_bytes(storage), abs=4096 * 6)
        state.close()
        assert mx.get_active_memory() - before < 4096
    engine.close()


def test_decoding_writes_caches_in_place() -> None:
    """A step's peak stays far below one more copy of the cache."""
    engine = opened(models.ONE_LAYER, context=8192)
    state = engine.start(engine.plan.storage)
    engine.forward([Chunk(state, [1] * 8, 1)])
    engine.forward([Chunk(state, [1], 1)])
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        engine.forward([Chunk(state, [1], 1)])
    grown = mx.get_peak_memory() - held
    engine.close()
    assert grown < engine.state_bytes(engine.plan.storage) / 4


@pytest.mark.parametrize("recipe", ["s4-g32", "s8", "float16"])
def test_weight_bytes_equal_plan(recipe: str) -> None:
    made = mlx_model("llama", recipe)
    cpu = load_profile("laptop-x86-8gb").model_copy(update={"targets": {"mlx": ("cpu",)}})
    offer = next(offer for offer in MlxTarget().offers(made.plan.model, cpu) if offer.recipe.name == recipe)
    before = mx.get_active_memory()
    engine = MlxEngine(made.plan, made.files)
    taken = mx.get_active_memory() - before
    engine.close()
    predicted = stored_weight_bytes(made.plan.model, offer.recipe, offer.memory)
    assert taken == pytest.approx(predicted, rel=0.02)  # dozens of tiny arrays, each rounded up by the allocator


def test_engine_works_from_any_thread() -> None:
    engine = opened("llama")
    state = engine.start(engine.plan.storage)
    engine.forward([Chunk(state, [1, 2, 3], 0)])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(engine.forward([Chunk(state, [4], 1)])[0]))
    thread.start()
    thread.join()
    state.rewind(1)
    np.testing.assert_array_equal(engine.forward([Chunk(state, [4], 1)])[0], found[0])
    engine.close()


def test_metal_plan_runs_on_cpu_with_a_note() -> None:
    if mx.metal.is_available():
        pytest.skip("Metal is here")
    made = mlx_model("llama", "s4-g32", backend="metal", kv_bits=16)
    engine = MlxTarget().open(made.plan, made.files)
    assert engine.notes == ("made for Metal and run on the CPU in float32: for checking, not for speed",)
    assert engine.capabilities.kv_bits == (32, 16) and engine.capabilities.exact == "always"
    tokens = models.tokens_of(60)
    found = fed(engine, engine.start(storage_of(engine, 32)), tokens, [20])
    engine.close()
    assert apart(found, mlx_model("llama").logits(tokens)) < 1e-5


def test_wired_limit() -> None:
    made = mlx_model("llama")
    estimate = made.plan.estimate.model_copy(update={"private_weights_bytes": 12 << 30, "runtime_bytes": 1 << 30})
    plan = made.plan.model_copy(update={"estimate": estimate})
    assert wired_limit(plan, 16 << 30) == (12 << 30, ())
    limit, notes = wired_limit(plan, 10 << 30)
    assert limit == 10 << 30 and "iogpu.wired_limit_mb=12288" in notes[0]


def copied(tmp_path: Path) -> tuple[Any, Path]:
    made = mlx_model("llama").copied(tmp_path)
    return made.plan, made.files


def test_damaged_folder_is_refused(tmp_path: Path) -> None:
    plan, files = copied(tmp_path)
    whole, config = (files / WEIGHTS).read_bytes(), json.loads((files / "config.json").read_text())
    other = mlx_model("qwen3")
    damages: dict[str, tuple[str, bytes | None]] = {
        "cut short": (WEIGHTS, whole[:-1]),
        "empty": (WEIGHTS, b""),
        "missing": (WEIGHTS, None),
        "another model": (WEIGHTS, (other.files / WEIGHTS).read_bytes()),
        "a huge header": (WEIGHTS, (1 << 60).to_bytes(8, "little") + whole[8:]),
        "config missing": ("config.json", None),
        "config is no object": ("config.json", b"[]"),
        "no quantization": ("config.json", json.dumps({**config, "quantization": None}).encode()),
        "other bits": ("config.json", json.dumps({**config, "quantization": {"bits": 8, "group_size": 32}}).encode()),
        "bits of text": ("config.json", json.dumps({**config, "quantization": {"bits": "4"}}).encode()),
        "quantization of text": ("config.json", json.dumps({**config, "quantization": "yes"}).encode()),
    }
    for what, (name, data) in damages.items():
        before = (files / name).read_bytes()
        (files / name).unlink() if data is None else (files / name).write_bytes(data)
        with pytest.raises(EdgekitError) as caught:
            MlxEngine(plan, files)
        assert "\n" not in str(caught.value) and len(str(caught.value)) > 20, what
        assert not isinstance(caught.value, TargetFailed), what
        (files / name).write_bytes(before)
    MlxEngine(plan, files).close()


def test_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    plan, files = copied(tmp_path)
    grown = plan.model.model_copy(update={"intermediate_size": 256})
    with pytest.raises(DamagedArtifact, match=r"mlp.gate_proj.weight.*expected U32 \[256, 8\]; export again"):
        MlxEngine(plan.model_copy(update={"model": grown}), files)


@pytest.mark.parametrize(
    ("system", "machine", "absent", "said"),
    [
        ("Linux", "x86_64", "mlx", "mlx is not installed; pip install 'edgekit[mlx]'"),
        ("Windows", "AMD64", None, "not on Windows AMD64; use --target onnx here"),
        ("Darwin", "x86_64", None, "not on Darwin x86_64; use --target onnx here"),
        ("Linux", "x86_64", "kernels", "without its CPU kernels; pip install 'edgekit[mlx]'"),
    ],
    ids=["not installed", "Windows", "Intel Mac", "no kernels"],
)
def test_missing_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, system: str, machine: str, absent: str | None, said: str
) -> None:
    made = mlx_model("llama")
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    if absent == "mlx":
        monkeypatch.setattr("edgekit_mlx.find_spec", lambda name: None)
    if absent == "kernels":
        monkeypatch.setattr("edgekit_mlx.version_of", lambda name: None)
    assert said in str(MlxTarget().missing())
    with pytest.raises(TargetMissing, match=r"(?i)mlx"):
        MlxTarget().open(made.plan, made.files)


def test_mlx_errors_become_target_failed() -> None:
    worker = MlxThread()
    with pytest.raises(TargetFailed, match="mlx: "):
        worker.run(lambda: mx.eval(mx.zeros((2, 3)) @ mx.zeros((2, 3))))
    assert worker.run(lambda: mx.ones(3).sum().item()) == 3.0
    worker.close()
    with pytest.raises(InvalidInput, match="closed"):
        worker.run(lambda: None)


@pytest.mark.parametrize(
    ("family", "bits"), [("llama", (16,)), (WITH_WIDE_HEADS, (16, 8, 4))], ids=["heads of 16", "heads of 32"]
)
def test_kv_bits_need_a_dividing_group(family: str, bits: tuple[int, ...]) -> None:
    model = mlx_model(family).plan.model
    found = {offer.capabilities.kv_bits for offer in MlxTarget().offers(model, load_profile("macbook-m4-16gb"))}
    assert found == {bits}
    if 8 not in bits:
        engine = opened(family)
        with pytest.raises(Unsupported, match="8-bit keys and values; this artifact can have 32, 16"):
            engine.start(storage_of(engine, 8))
        engine.close()


def test_offer_notes_windows_that_mlx_lm_ignores() -> None:
    model = mlx_model("gemma2").plan.model
    notes = " ".join(next(iter(MlxTarget().offers(model, load_profile("macbook-m4-16gb")))).notes)
    assert "opened without edgekit: mlx-lm's gemma2 ignores the window of 12 tokens" in notes
    assert models.FAMILIES["gemma2"][1]["sliding_window"] == 12


TOKENS = models.tokens_of(50)


@pytest.mark.parametrize("family", ["llama", *HYBRIDS])
def test_row_by_row_equals_chunks_and_batches(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact mode on Metal runs; on the CPU no bit changes. Drafts that are verified so enter no recurrent part."""
    monkeypatch.setattr(recurrent, "LEAST_TOKENS", 4)
    found, made = [], mlx_model(family, "s4-g64")
    for one_by_one in (False, True):
        engine = MlxEngine(made.plan, made.files)
        engine._one_by_one = one_by_one
        state, other = (engine.start(engine.plan.storage) for _ in range(2))
        feed(engine, state, TOKENS[:20])
        rows = engine.forward([Chunk(state, TOKENS[20:25], 5), Chunk(other, TOKENS[:20], 6)])
        state.rewind(3)
        rows += [feed(engine, state, TOKENS[40:50], 10)]
        found.append(np.concatenate(rows))
        engine.close()
    np.testing.assert_array_equal(found[0], found[1])


def test_a_long_prompt_holds_few_memories() -> None:
    """The delta rule's memory takes a mebibyte here, and 64 tokens change it one after the other."""
    rule = DeltaRule(key_heads=1, value_heads=16, key_dim=128, value_dim=128, taps=2)
    vectors = {"dt_bias": mx.ones(16), "A_log": mx.zeros(16)}
    run = Carry(64, 64, mx.zeros((16, 128, 128)))
    mx.eval(vectors, run.array)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    each = mx.ones((64, rule.value_heads))
    mx.eval(delta_rule(rule, vectors.__getitem__, mx.ones((64, rule.channels)), each, each, [run]))
    assert mx.get_peak_memory() - before < 20 << 20


@pytest.mark.parametrize("recipe", ["s4-g32", "float32"])
def test_the_table_of_layer_inputs_is_not_held(recipe: str) -> None:
    made = mlx_model("gemma4", recipe)
    model, facts = made.plan.model, offer(made.plan.model, "cpu", made.plan.recipe).memory
    table = by_rows_bytes(model, made.plan.recipe, facts)
    assert table > 0
    weights = Weights(model, made.files, numbers=mx.float32)
    assert weights.bytes == pytest.approx(stored_weight_bytes(model, made.plan.recipe, facts) - table, rel=0.01)


without_metal = pytest.mark.skipif(sys.platform == "darwin", reason="this machine has Metal")


def mac_plan(recipe: str) -> Plan:
    wish = PlanRequest(recipe=named_recipe(recipe), target="mlx", context=256)
    return make_plans("demo-draft", ["macbook-m4-16gb"], wish)[0]


@without_metal
def test_a_plan_for_metal_counts_the_cpu_backend_where_metal_is_not() -> None:
    plan = mac_plan("s8")
    here = MlxTarget().adapt(plan)
    assert here.memory.runtime_bytes == 41 * MIB < plan.memory.runtime_bytes
    assert (here.memory.scale_bits, here.memory.float_bits) == (32, 32), "the CPU holds scales and floats in 32 bits"
    assert here.memory.tokenizer_bytes == plan.memory.tokenizer_bytes, "what was measured of the tokenizer stays"
    assert on_this_machine(plan, has_metal=True) == plan


@without_metal
def test_opening_an_artifact_for_a_mac_predicts_what_it_takes_here(tmp_path: Path) -> None:
    """150 MiB of Metal's libraries were counted, so that the demo was predicted to take three times its memory."""
    artifact = export(mac_plan("s8"), tmp_path / "mac").folder
    with open_runtime(artifact, context=128, prefixes=0) as runtime:
        report = runtime.memory()
    assert report.predicted.runtime_bytes < 60 * MIB


def test_float32_runs_on_the_cpu(tmp_path: Path) -> None:
    wish = PlanRequest(recipe=named_recipe("float32"), target="mlx", context=128)
    plan = make_plans("demo-draft", ["laptop-x86-8gb"], wish)[0]
    assert (plan.backend, plan.recipe.name) == ("cpu", "float32")
    assert "logits within 2%" in export(plan, tmp_path / "float").manifest.self_check
