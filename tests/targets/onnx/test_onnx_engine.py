"""The engine passes the conformance suite: bitwise in exact mode, otherwise within rounding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import family_models as models
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT, FAST
from edgekit_onnx.sessions import PROVIDERS
from engines import Model, onnx_model

from edgekit.common.packages import UNREPORTED
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.errors import InvalidInput, TargetFailed, TargetMissing, Unsupported
from edgekit.testing import check_engine

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]
RULE = pytest.mark.usefixtures("own_operators")


@pytest.fixture(scope="module")
def llama() -> Model:
    return onnx_model("llama", "s4-g64", FAST, exits=(1, 2))


@pytest.mark.parametrize("family", ["llama 3 rope, wide heads", "phi3 with longrope", "gemma3", "smollm3", "hunyuan"])
def test_one_layer_eviction_equals_never_fed(family: str) -> None:
    """Whole heads, parts of heads, and layers whose rope is scaled."""
    config = models.FAMILIES[family][1]
    one: dict[str, Any] = {"num_hidden_layers": 1, "sliding_window": None}
    one |= {"layer_types": ["full_attention"]} if "layer_types" in config else {}
    one |= {"no_rope_layers": [0]} if "no_rope_layers" in config else {}
    made = onnx_model(family, config=one)
    check_engine(made.open, exact=False, tolerance=2e-5, memoryless=True, sequences=25)


def test_a_segment_of_another_model_is_refused(llama: Model, tmp_path: Path) -> None:
    other = onnx_model("llama", "s4-g32", FAST)
    with_segment, engine = other.open(), llama.open()
    state = with_segment.start(other.plan.storage)
    with_segment.forward([Chunk(state, [1, 2, 3], 0)])
    segment = state.save(0, 3)
    segment.write(tmp_path / "segment")
    with pytest.raises(InvalidInput, match="another model"):
        engine.read_segment(tmp_path / "segment")
    with pytest.raises(InvalidInput, match="not saved by this model"):
        engine.start(engine.plan.storage).restore(segment)
    with_segment.close()
    engine.close()


@RULE
def test_exact_mode_is_refused_where_kernels_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels break the rule when a single token is not padded."""
    made = onnx_model("llama", "s4-g64", FAST)
    with monkeypatch.context() as broken:
        broken.setattr("edgekit_onnx.engine.padded_tokens", lambda tokens: tokens)
        with pytest.raises(Unsupported, match="does not hold on this machine"):
            made.open(exact=True).start(made.plan.storage)
    made.open(exact=True).start(made.plan.storage).close()


@RULE
def test_exact_mode_on_arm64_feeds_single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, kernels take other steps for other even numbers of tokens."""
    monkeypatch.setattr("edgekit_onnx.exactness.is_arm64", lambda: True)
    made = onnx_model("llama", "s4-g64", FAST, exits=(1,))
    sizes = set()

    def open_watched() -> OnnxEngine:
        engine = made.open(exact=True)
        runner = engine._runner
        body, logits = runner.body, runner.logits
        monkeypatch.setattr(runner, "body", lambda *given: sizes.add(given[3].ids.size) or body(*given))
        monkeypatch.setattr(runner, "logits", lambda start, stop: sizes.add(stop - start) or logits(start, stop))
        return engine

    check_engine(open_watched, exact=True, tolerance=0, sequences=20)
    assert sizes == {1}


@RULE
def test_exact_mode_on_arm64_refuses_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit_onnx.exactness.is_arm64", lambda: True)
    made = onnx_model("lfm2", "s4-g32", FAST)
    assert made.open().capabilities.exact == "never"
    with pytest.raises(Unsupported, match="recurrent part of this model's layers does not allow"):
        made.open(exact=True)


@RULE
def test_exact_mode_with_sixteen_bit_keys_is_refused() -> None:
    made = onnx_model("llama", "s4-g32", FAST, kv_bits=16)
    assert made.open().capabilities.exact == "never"
    with pytest.raises(Unsupported, match="32 or 8 bits"):
        made.open(exact=True)
    with pytest.raises(Unsupported, match="exact mode needs keys and values of 32 or 8 bits"):
        onnx_model("llama").open(exact=True).start(made.plan.storage)


@RULE
def test_wide_heads_are_exact_with_eight_bits_only() -> None:
    """onnxruntime sums the scores of a head of more than 128 values in pieces that depend on the number of keys."""
    made = onnx_model("qwen3", "s4-g64", FAST, config={"head_dim": 256}, context=256, chunk_tokens=200)
    engine = made.open(exact=True)
    with pytest.raises(Unsupported, match="more than 128 values"):
        engine.start(made.plan.storage)
    engine.start(made.plan.storage.model_copy(update={"kv_bits": 8}))  # which checks that it is exact
    engine.close()


def test_states_of_different_capacity(llama: Model) -> None:
    engine = llama.open(exact=True)
    sizes = [64, 128, 64]
    states = [engine.start(KVCacheConfig(capacity_tokens=size, kv_bits=32)) for size in sizes]
    found = engine.forward([Chunk(state, [3, 4, 5], 1) for state in states])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    assert states[1].bytes > states[0].bytes
    engine.close()


def test_cuda_graphs_agree_on_the_cpu() -> None:
    """The CPU runs the graphs written for CUDA: logits are close to float32, and the suite passes within rounding."""
    made = onnx_model("llama", "s4-g32", EXACT, backend="cuda", kv_bits=16)
    cpu = PROVIDERS["cpu"]
    check_engine(lambda: OnnxEngine(made.plan, made.files, provider=cpu), exact=False, tolerance=0.03, sequences=40)


def test_cuda_is_active_or_an_error() -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    made = onnx_model("llama", "s4-g32", EXACT, backend="cuda", kv_bits=16)
    with pytest.raises(TargetMissing, match="has no CUDAExecutionProvider"):
        made.open()


OPENING = """
import sys
from pathlib import Path
from edgekit.contracts.engine import Chunk
from edgekit.contracts.plan import Plan
from edgekit_onnx import OnnxTarget
plan = Plan.model_validate_json(sys.argv[1])
engine = OnnxTarget().open(plan, Path(sys.argv[2]))
engine.forward([Chunk(engine.start(plan.storage), [1, 2, 3], 1)])
"""


def test_onnxruntime_ends_calls_when_it_is_told_to(llama: Model) -> None:
    engine = llama.open()
    states = [engine.start(engine.plan.storage) for _ in range(2)]
    engine.forward([Chunk(states[0], [5] * 8, 0)])
    engine._runner.interrupt()  # not `interrupt`, after which no call reaches onnxruntime
    for state in states:
        with pytest.raises(TargetFailed, match="terminate flag"):
            engine.forward([Chunk(state, [5] * 8, 1)])
    engine.close()


def test_onnxruntime_telemetry_is_off(tmp_path: Path, llama: Model) -> None:
    """onnxruntime would store an id of the machine, and unsent events, in the user's home."""
    (tmp_path / "user").mkdir()
    told = {name: value for name, value in os.environ.items() if name not in (*UNREPORTED, "XDG_CACHE_HOME")}
    command = [sys.executable, "-c", OPENING, llama.plan.model_dump_json(), str(llama.files)]
    subprocess.run(command, env={**told, "HOME": str(tmp_path / "user")}, check=True)
    assert list((tmp_path / "user").iterdir()) == []
