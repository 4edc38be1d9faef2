"""GPTQ, AWQ and mixed recipes choose better integers; a killed run goes on and ends in the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import quantisation_cost

from edgekit.errors import InvalidInput
from edgekit.recipe import Format, Recipe, bits_per_weight, named_recipe
from edgekit.source import open_source
from edgekit.store import Store
from edgekit.weights import awq, decoder, parts, quantise
from edgekit.weights.calibration import Calibration, read_calibration
from edgekit.weights.gptq import gptq
from edgekit.weights.handover import handover, refuse_split
from edgekit.weights.mixed import budget_bytes
from edgekit.weights.moments import Moments, lost_outputs
from edgekit.weights.neutral import CalibrationFact, NeutralWeights
from edgekit.weights.quantise import neutral_weights
from edgekit.weights.rtn import dequantise, round_to_nearest
from edgekit.weights.safetensors import TensorFolder

pytestmark = pytest.mark.quantize

S4 = Format(kind="s4", group=32)


def calibration_of(count: int = 16, length: int = 32, vocabulary: int = 160) -> Calibration:
    """Tokens that follow each other by a rule, so that inputs are far from independent."""
    rows = [
        tuple(int(3 + (seed * 7 + step * step) % (vocabulary - 3)) for step in range(length)) for seed in range(count)
    ]
    fact = CalibrationFact(sha256="0" * 64, description="a rule", sequences=count, tokens=count * length)
    return Calibration(tuple(rows), fact)


def correlated(rows: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, inputs // 4, generator=generator) @ torch.randn(inputs // 4, inputs, generator=generator)


@pytest.mark.parametrize("stored", [S4, Format(kind="s4", group=128), Format(kind="s8")], ids=str)
def test_gptq_loses_less_of_the_outputs_than_rounding_to_nearest(stored: Format) -> None:
    weights, inputs = torch.randn(48, 256) * 0.05, correlated(512, 256) + 0.1 * torch.randn(512, 256)
    hessian = inputs.T @ inputs
    ours = lost_outputs(dequantise(*gptq(weights, hessian, stored)) - weights, hessian)
    nearest = lost_outputs(dequantise(*round_to_nearest(weights, stored)) - weights, hessian)
    assert ours < 0.5 * nearest


@pytest.mark.parametrize("case", ["a dead input", "no input at all", "fewer rows than inputs", "huge inputs"])
def test_gptq_is_sound_on_poor_calibration(case: str) -> None:
    weights, inputs = torch.randn(16, 64) * 0.05, torch.randn(300, 64)
    if case == "a dead input":
        inputs[:, 5] = 0
    elif case == "no input at all":
        inputs[:] = 0
    elif case == "fewer rows than inputs":
        inputs = inputs[:3]
    else:
        inputs *= 1e6
    rounded = gptq(weights, inputs.T @ inputs, S4)
    values = dequantise(*rounded)
    assert torch.isfinite(values).all()
    assert (values - weights).square().sum() < 0.2 * weights.square().sum()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_integers_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    weights, inputs = torch.randn(50, 64) * 0.05, torch.randn(300, 64)
    hessian = inputs.T @ inputs
    before = torch.get_num_threads()
    expected = gptq(weights, hessian, S4)
    try:
        torch.set_num_threads(threads)
        found = gptq(weights, hessian, S4)
    finally:
        torch.set_num_threads(before)
    assert (found.scales - expected.scales).abs().max() < 1e-3
    assert (found.integers != expected.integers).float().mean() < 0.02


@pytest.mark.parametrize(
    "family", ["llama", "llama untied, with biases", "qwen3", "phi3", "gemma2", "gemma3", "smollm3"]
)
def test_awq_folds_its_factors_without_changing_what_a_layer_computes(tmp_path: Path, family: str) -> None:
    kind, config = models.FAMILIES[family]
    models.write_model(tmp_path, kind, config)
    spec, stored = models.spec_of(tmp_path), TensorFolder.open(tmp_path)
    tensors = decoder.layer_tensors(spec, 1, lambda name: torch.from_numpy(stored.floats(name)))
    hidden = torch.randn(2, 20, spec.hidden_size)
    before = decoder.layer_forward(spec, 1, tensors, hidden)
    head_dim = spec.layers[1].head_dim
    for fold in awq.folds_of(spec, 1):
        width = tensors[f"{fold.linears[0]}.weight"].shape[1]
        factors = awq._shared(torch.rand(width) + 0.5, fold.repeats, head_dim)
        awq.fold_in(spec, fold, tensors, factors, head_dim)
    after = decoder.layer_forward(spec, 1, tensors, hidden)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_linears_with_the_same_input_share_one_sum() -> None:
    moments = Moments(frozenset({"q", "k", "down"}))
    for _ in range(2):
        inputs = torch.ones(1, 3, 4)
        moments("q", inputs)
        moments("k", inputs)
        moments("down", 2 * inputs)
        moments("unwanted", inputs)
    assert moments.hessian("q") is moments.hessian("k")
    assert moments.hessian("q")[0, 0] == 6
    assert moments.hessian("down")[0, 0] == 24
    assert moments.size("down")[0] == 2


@pytest.fixture(scope="module")
def demo_logits() -> tuple[Any, Any, Any]:
    """The bundled model, some of its held-out text, and what the float model says of it."""
    from tokenizers import Tokenizer

    source = open_source("demo", need_weights=True)
    tokenizer = Tokenizer.from_file(str(source.folder / "tokenizer.json"))
    held_out = Path(decoder.__file__).parents[1] / "_demo" / "held_out.jsonl"
    texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()]
    texts = [text for text in texts if len(text) > 3000][:4]
    tokens = torch.tensor([tokenizer.encode(text).ids[:256] for text in texts])
    stored = TensorFolder.open(source.folder)
    expected = decoder.logits(source.spec, lambda name: torch.from_numpy(stored.floats(name)), tokens).log_softmax(-1)
    return source, tokens, expected


def divergence(weights: NeutralWeights, tokens: Any, expected: Any) -> float:
    found = decoder.logits(weights.model, lambda name: torch.from_numpy(weights.tensor(name)), tokens).log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


@pytest.mark.slow
def test_gptq_keeps_far_more_of_a_trained_model_than_rounding(tmp_path: Path, demo_logits: Any) -> None:
    source, tokens, expected = demo_logits
    calibration = read_calibration(None, source.folder, sequences=24, length=256)
    kl = {
        method: divergence(
            neutral_weights(
                source,
                named_recipe("s4-g32"),
                method=method,  # type: ignore[arg-type]
                calibration=None if method == "rtn" else calibration,
                store=Store(tmp_path),
            ),
            tokens,
            expected,
        )
        for method in ("rtn", "gptq")
    }
    assert kl["gptq"] < 0.5 * kl["rtn"], kl


def test_a_budget_is_kept_and_spent_where_it_helps(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["qwen3"]
    models.write_model(tmp_path / "model", kind, config)
    recipe = named_recipe("s4-g64").model_copy(update={"name": "to 5.5", "bits_per_weight": 5.5})
    weights = neutral_weights(
        tmp_path / "model", recipe, calibration=calibration_of(), method="rtn", store=Store(tmp_path / "store")
    )
    formats = {str(weights.format_of(module)) for module in weights.modules()}
    assert formats == {"s8", "s4-g64"}
    used = bits_per_weight(weights.model, weights.recipe)
    assert 5.2 < used <= 5.5
    assert budget_bytes(recipe, weights.model) * 8 / weights.model.parameters <= 5.5
    assert "climbed to s8" in weights.manifest.notes[0]
    again = neutral_weights(
        tmp_path / "model", recipe, calibration=calibration_of(), method="rtn", store=Store(tmp_path / "other")
    )
    assert again.sha256 == weights.sha256


def test_what_servers_hold_as_one_tensor_climbs_together_in_a_handover(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["qwen3"]
    models.write_model(tmp_path / "model", kind, config)
    base = handover(named_recipe("s4-g64"))
    spec = open_source(tmp_path / "model").spec
    budget = bits_per_weight(spec, base) + 1.0
    recipe = base.model_copy(update={"bits_per_weight": budget})
    weights = neutral_weights(
        tmp_path / "model", recipe, calibration=calibration_of(), method="rtn", store=Store(tmp_path / "store")
    )
    refuse_split(weights.model, weights.recipe)
    assert {str(weights.format_of(module)) for module in weights.modules()} == {"float16", "s8", "s4-g64"}
    assert bits_per_weight(weights.model, weights.recipe) <= budget


def test_a_method_that_needs_text_is_refused_without_it(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["llama"]
    models.write_model(tmp_path / "model", kind, config)
    with pytest.raises(InvalidInput, match="gptq needs calibration text"):
        neutral_weights(tmp_path / "model", named_recipe("s4-g32"), method="gptq", store=Store(tmp_path / "store"))


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibrated_weights_are_whole_and_measured(tmp_path: Path, family: str, method: Any) -> None:
    kind, config = models.FAMILIES[family]
    models.write_model(tmp_path / "model", kind, config)
    told: list[str] = []
    weights = neutral_weights(
        tmp_path / "model",
        named_recipe("s4-g32"),
        method=method,
        calibration=calibration_of(),
        store=Store(tmp_path / "store"),
        progress=lambda done, total, what: told.append(what),
    )
    weights.verify()
    assert weights.manifest.method == method
    assert weights.manifest.calibration is not None
    measured = [item.output_error for item in weights.manifest.statistics.values() if item.output_error is not None]
    assert len(measured) == sum(tensor.role == "linear" for tensor in weights.model.tensors())
    assert all(0 <= error < 0.2 for error in measured)
    assert any("layer 1 (the one before lost" in what for what in told)


def _quantise(model: Path, store: Path, told: Any, answer: Any) -> None:
    torch.set_num_threads(1)

    def progress(done: float, total: float, what: str) -> None:
        told.value += 1

    weights = neutral_weights(
        model,
        named_recipe("s4-g32"),
        method="gptq",
        calibration=calibration_of(),
        store=Store(store),
        progress=progress,
    )
    answer.put(weights.sha256)


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_goes_on_and_ends_in_the_same_bytes(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["llama"]
    deep = {**config, "num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 512, "head_dim": 32}
    models.write_model(tmp_path / "model", kind, deep)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    moments = random.Random(3)

    def start(store: Path) -> tuple[Any, Any, Any]:
        told, answer = context.RawValue("i", 0), context.SimpleQueue()
        process = context.Process(target=_quantise, args=(tmp_path / "model", store, told, answer))
        process.start()
        return process, told, answer

    def finished(store: Path) -> str:
        process, _, answer = start(store)
        process.join(240)
        assert process.exitcode == 0
        return str(answer.get())

    since = time.monotonic()
    expected = finished(tmp_path / "whole")
    layer_s = (time.monotonic() - since) / 10
    stores, kills = [tmp_path / "0"], 0
    while kills < 10:
        assert len(stores) <= 20, "it ends each time before it can be killed"
        process, told, answer = start(stores[-1])
        parts = moments.randint(1, 3)
        while told.value < parts and process.is_alive():
            time.sleep(0.001)
        process.join(moments.uniform(0, layer_s))
        process.kill()
        process.join()
        if process.exitcode == 0:
            assert answer.get() == expected
            stores.append(tmp_path / str(len(stores)))
        else:
            assert process.exitcode == -signal.SIGKILL
            kills += 1
    assert finished(stores[-1]) == expected
    # Killed after the last rename, a process leaves its lock's file, which locks nothing.
    assert not list((stores[-1] / "weights").glob(".*.part"))


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_stopped_after_any_part_it_ends_in_the_same_bytes(tmp_path: Path, method: Any) -> None:
    kind, config = models.FAMILIES["llama"]
    models.write_model(tmp_path / "model", kind, config)
    text = None if method == "rtn" else calibration_of()

    def run(store: str, stop_at: int | None = None) -> NeutralWeights:
        told = 0

        def progress(done: float, total: float, what: str) -> None:
            nonlocal told
            told += 1
            if told == stop_at:
                raise StoppedError

        return neutral_weights(
            tmp_path / "model",
            named_recipe("s4-g32"),
            method=method,
            calibration=text,
            store=Store(tmp_path / store),
            progress=progress,
        )

    expected = run("whole")
    for stop_at in (2, 3, 4, 5, 6):
        with pytest.raises(StoppedError):
            run("stopped", stop_at)
        parts = list((tmp_path / "stopped" / "weights").glob(".*.part/*.safetensors"))
        assert len(parts) == stop_at - 1
    found = run("stopped")
    assert found.sha256 == expected.sha256
    assert (found.folder / "edgekit.json").read_bytes() == (expected.folder / "edgekit.json").read_bytes()


@pytest.mark.parametrize("step", ["write_index", "write_file", "copy_companions", "file_sha256", "forget_statistics"])
@pytest.mark.parametrize("after", [0, 1])
def test_stopped_while_it_is_sealed_it_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: int
) -> None:
    kind, config = models.FAMILIES["llama"]
    models.write_model(tmp_path / "model", kind, config)
    expected = neutral_weights(tmp_path / "model", named_recipe("s4-g32"), store=Store(tmp_path / "whole"))
    room = quantise if hasattr(quantise, step) else parts
    whole, calls = getattr(room, step), 0

    def stop(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise StoppedError
        return whole(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(room, step, stop)
        if after == 0 or step not in ("write_index", "copy_companions"):  # these are called once
            with pytest.raises(StoppedError):
                neutral_weights(tmp_path / "model", named_recipe("s4-g32"), store=Store(tmp_path / "store"))
    found = neutral_weights(tmp_path / "model", named_recipe("s4-g32"), store=Store(tmp_path / "store"))
    assert found.sha256 == expected.sha256
    assert sorted(path.name for path in found.folder.iterdir()) == sorted(
        path.name for path in expected.folder.iterdir()
    )


CAPPED = """
import resource, sys, threading, time
from pathlib import Path
from edgekit.recipe import named_recipe
from edgekit.store import Store
from edgekit.weights.quantise import neutral_weights
import torch

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

base, peak = anonymous(), 0
data = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (data + int(sys.argv[3]), data + int(sys.argv[3])))

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.005)

threading.Thread(target=watch, daemon=True).start()
neutral_weights(Path(sys.argv[1]), named_recipe("s4-g32"), store=Store(Path(sys.argv[2])))
print(peak - base)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rounding_holds_blocks_of_rows_and_never_the_model(tmp_path: Path) -> None:
    """Under a limit on private memory far below the model, and below its largest tensor in float32."""
    config = {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3,
        "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 64000, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
    }  # fmt: skip
    parameters = quantisation_cost.write_random_model(tmp_path / "model", config)
    assert 2 * parameters > 190e6
    done = subprocess.run(
        [sys.executable, "-c", CAPPED, str(tmp_path / "model"), str(tmp_path / "store"), str(160 << 20)],
        capture_output=True,
        text=True,
        env={**os.environ, "EDGEKIT_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 110e6


def test_recipes_may_be_rules_of_ones_own(tmp_path: Path) -> None:
    from edgekit.reading import read_yaml

    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nrules:\n"
        "- {pattern: '*embed_tokens*', format: {kind: float16}}\n"
        "- {pattern: '*.down_proj', format: {kind: s8}}\n"
        "- {pattern: '*', format: {kind: s4, group: 32}}\n"
        "float_format: {kind: bfloat16}\n"
    )
    kind, config = models.FAMILIES["llama"]
    models.write_model(tmp_path / "model", kind, config)
    weights = neutral_weights(tmp_path / "model", read_yaml(path, Recipe), store=Store(tmp_path / "store"))
    assert str(weights.format_of("model.layers.0.mlp.down_proj")) == "s8"
    assert str(weights.format_of("model.layers.0.mlp.up_proj")) == "s4-g32"
    assert TensorFolder.open(weights.folder).entry("model.norm.weight").dtype == "BF16"
