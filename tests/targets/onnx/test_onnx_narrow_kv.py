"""Caches of 16 and 8 bits on ONNX Runtime: close to float32, of the promised size, with every other feature."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgekit_onnx.memory import CACHE

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx.float16_kv import with_halves
from edgekit_onnx.int8_kv import MARGIN, STEPS_FILE, KVRange, read_steps, with_steps
from engines import Model, onnx_model

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.errors import DamagedArtifact, Unsupported
from edgekit.formats.safetensors import TensorFolder
from edgekit.formats.safetensors_writer import TensorWriter

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

# By bits of the cache; a window that is left out makes it 0.5.
NEAR = {32: 0.0, 16: 0.01, 8: 0.05}


def distance(fp32: np.ndarray[Any, Any], int8: np.ndarray[Any, Any]) -> float:
    """The root mean square difference of logits over their standard deviation."""
    return float(np.sqrt(np.mean((fp32 - int8) ** 2)) / fp32.std())


@pytest.fixture(scope="module")
def llama() -> Model:
    return onnx_model("llama", exits=(1,))


# Rounded keys can choose other experts, whose logits are others, unless a token uses all of them.
CHOSEN = models.EXPERTS.keys() | models.HYBRID_EXPERTS.keys()


@pytest.mark.parametrize("family", [*sorted(models.EVERY.keys() - CHOSEN), "gpt_oss, all experts, tied"])
def test_logits_of_every_width_are_close(family: str) -> None:
    """Prefill in pieces beyond declared windows, then decode token by token."""
    engine = onnx_model(family).open()
    assert engine.capabilities.kv_bits == (32, 16, 8)
    tokens, said = list(models.tokens_of(40)), {}
    for bits in engine.capabilities.kv_bits:
        state = engine.start(KVCacheConfig(capacity_tokens=64, kv_bits=bits))
        parts = [tokens[:16], tokens[16:29], *([token] for token in tokens[29:])]
        said[bits] = np.concatenate([engine.forward([Chunk(state, part, len(part))])[0] for part in parts])
        state.close()
    found = {bits: distance(said[32], logits) for bits, logits in said.items()}
    assert all(found[bits] <= NEAR[bits] for bits in found), found
    assert found[32] < found[16] < found[8], "it held as many bits"
    engine.close()


def test_state_takes_the_bytes_of_its_width(llama: Model) -> None:
    engine = llama.open()
    for bits in (32, 16, 8):
        taken = engine.state_bytes(KVCacheConfig(capacity_tokens=64, kv_bits=bits))
        assert taken == CACHE.state_bytes(llama.plan.model, 64, bits)
    engine.close()


@pytest.mark.parametrize("bits", [16, 8])
def test_keys_are_rotated_on_eviction(llama: Model, bits: int) -> None:
    """After the same evictions, a narrow state gives almost the logits of a float32 state."""
    engine, tokens, said = llama.open(), list(models.tokens_of(30)), []
    for width in (32, bits):
        state = engine.start(KVCacheConfig(capacity_tokens=64, kv_bits=width))
        engine.forward([Chunk(state, tokens[:16], 0)])
        for stop in (10, 8, 6):
            state.evict(4, stop)
        engine.forward([Chunk(state, tokens[16:], 0)])
        said.append(engine.forward([Chunk(state, [3], 1)])[0])
        state.close()
    assert distance(*said) <= NEAR[bits]
    engine.close()


def test_plan_with_int8_kv_opens() -> None:
    made = onnx_model("llama", kv_bits=8)
    engine = made.open()
    state = engine.start(made.plan.storage)
    assert state.bytes == engine.state_bytes(made.plan.storage.model_copy(update={"kv_bits": 32})) // 4
    engine.close()


def test_unused_session_variants_are_dropped(llama: Model) -> None:
    """The float32 sessions are closed when every state is 8-bit."""
    engine = llama.open()
    engine.start(KVCacheConfig(capacity_tokens=64, kv_bits=8))
    assert {variant.kv_bits for variant in engine._variants._open} == {8}
    engine.start(KVCacheConfig(capacity_tokens=64, kv_bits=32))
    assert {variant.kv_bits for variant in engine._variants._open} == {8, 32}
    engine.close()


def test_a_dropped_engine_leaves_no_session(llama: Model) -> None:
    engine = llama.open()
    for bits in (8, 32):
        engine.forward([Chunk(engine.start(KVCacheConfig(capacity_tokens=64, kv_bits=bits)), [3, 4], 1)])
    opened = [session for sessions in engine._variants._open.values() for _, session in sessions]
    held = [weakref.ref(each) for each in [engine, *opened]]
    assert len(held) > 2
    del engine, opened
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


def test_artifact_without_steps_refuses_int8_kv(tmp_path: Path) -> None:
    made = onnx_model("llama").copied(tmp_path)
    (made.files / STEPS_FILE).unlink()
    engine = made.open()
    assert engine.capabilities.kv_bits == (32, 16)
    with pytest.raises(Unsupported, match="8-bit keys and values"):
        engine.start(KVCacheConfig(capacity_tokens=64, kv_bits=8))
    engine.close()


def rewrite(path: Path, dtype: str, arrays: dict[str, Any]) -> None:
    with TensorWriter(path, {name: (dtype, array.shape) for name, array in arrays.items()}) as writer:
        for name, array in arrays.items():
            writer.write(name, np.ascontiguousarray(array))
        writer.seal()


@pytest.mark.parametrize("damage", ["shape", "missing", "extra", "floats", "cut", "link"])
def test_damaged_steps_are_refused(tmp_path: Path, damage: str) -> None:
    made = onnx_model("llama").copied(tmp_path)
    path = made.files / STEPS_FILE
    with TensorFolder.open(path) as tensors:
        steps = np.array(tensors.array("steps"))
    changed = {"shape": steps[:-1], "missing": None, "extra": steps, "floats": steps.astype(np.float32)}.get(damage)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    elif damage == "link":
        os.link(path, tmp_path / "other")
    else:
        path.unlink()
        arrays = {"steps" if changed is not None else "other": steps if changed is None else changed}
        rewrite(path, "F32" if damage == "floats" else "U8", arrays | ({"more": steps} if damage == "extra" else {}))
    with pytest.raises(DamagedArtifact, match=r"export the artifact again|its own"):
        made.open()


@pytest.mark.parametrize("most", [1e-4, 0.37, 1.0, 11.0, 3e5])
def test_a_stored_step_is_at_most_a_sixteenth_of_an_octave_from_the_measured_one(llama: Model, most: float) -> None:
    model = llama.plan.model
    ranges = KVRange(model)
    layer = model.layers[0]
    for index in range(len(model.layers)):
        values = np.full((layer.kv_heads, 1, layer.head_dim), most, np.float32)
        ranges.observe(index, values, values)
    for _, steps in ranges.steps():
        assert np.abs(np.log2(steps * 127 / (MARGIN * most))).max() <= 1 / 16 + 1e-5


def test_a_channel_that_was_always_zero_has_a_step(llama: Model) -> None:
    for pair in KVRange(llama.plan.model).steps():
        assert all((steps > 0).all() for steps in pair)


def test_rotated_pair_has_one_step() -> None:
    """Otherwise a rotation would leave the range, or mix integers of different scales."""
    made = onnx_model("phi3 with longrope")
    steps = read_steps(made.files, made.plan.model)
    assert steps is not None
    for keys, _ in steps:
        width = keys.shape[1] // 2  # this family turns half of each head
        np.testing.assert_array_equal(keys[:, : width // 2], keys[:, width // 2 : width])
        assert not np.array_equal(keys[:, width : width + width // 2], keys[:, width + width // 2 : 2 * width])


@pytest.mark.parametrize("change", [with_steps, with_halves])
def test_graph_is_changed_once(llama: Model, change: Callable[[bytes], bytes]) -> None:
    """A graph saved by onnxruntime states default attributes; none may be added twice."""
    import onnx

    data = next(path for path in llama.files.iterdir() if path.name.startswith("body-0")).read_bytes()
    changed = onnx.ModelProto.FromString(change(data))
    for node in changed.graph.node:
        names = [attribute.name for attribute in node.attribute]
        assert len(names) == len(set(names))


def test_an_artifact_planned_with_16_bits_opens_with_8() -> None:
    made = onnx_model("llama", kv_bits=16)
    engine = made.open()
    assert engine.capabilities.kv_bits == (16, 8)
    engine.close()
