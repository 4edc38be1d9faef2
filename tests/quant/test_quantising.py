"""GPTQ, AWQ and mixed recipes choose better integers; a killed run resumes and gives the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
import shapes
import torch
from safetensors.torch import load_file, save_file

from edgekit.apps.handover.served_models import handover, refuse_split
from edgekit.common.content_store import ContentStore
from edgekit.common.progress import no_progress
from edgekit.contracts.neutral import CalibrationFact, NeutralWeights
from edgekit.contracts.recipe import Format, Recipe, Rule, bits_per_weight, budget_bytes, named_recipe, weight_bytes
from edgekit.errors import InvalidInput, Unsupported
from edgekit.formats.safetensors import TensorFolder
from edgekit.methods.quant import awq
from edgekit.model.source import open_source
from edgekit.quant import compute, pipeline as quantise, reference_decoder as decoder, shards as parts
from edgekit.quant.backward import head_name
from edgekit.quant.calibration import Calibration, read_calibration
from edgekit.quant.gptq import gptq, shares_left
from edgekit.quant.hessians import lost_outputs, second_moments
from edgekit.quant.pipeline import neutral_weights
from edgekit.quant.rtn import dequantise, round_to_nearest
from edgekit.quant.sensitivity import float_passes, predicted_losses
from examples.benchmarks import quantisation_cost

pytestmark = pytest.mark.quantize

S4 = Format(kind="s4", group=32)
ALL_S4 = Recipe(name="all", rules=(Rule(pattern="*", format=S4),))


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
    ours = lost_outputs(dequantise(*gptq([weights], hessian, stored)[0]) - weights, hessian)
    nearest = lost_outputs(dequantise(*round_to_nearest(weights, stored)) - weights, hessian)
    assert ours < 0.5 * nearest


def test_what_gptq_leaves_on_other_text_is_predicted_before_it_rounds() -> None:
    torch.manual_seed(0)
    weights, inputs = torch.randn(256, 256) * 0.05, correlated(2048, 256) + 0.5 * torch.randn(2048, 256)
    chosen_by, judged_by = (half.T @ half for half in torch.split(inputs, 1024))
    nearest = dequantise(*round_to_nearest(weights, S4)) - weights
    (chosen,) = gptq([weights], chosen_by, S4)
    left = lost_outputs(dequantise(*chosen) - weights, judged_by) / lost_outputs(nearest, judged_by)
    assert shares_left(chosen_by, judged_by, [nearest.square().mean(0)], S4) == [pytest.approx(left, rel=0.2)]


@pytest.mark.parametrize("family", ["gemma3", "llama untied, with biases"])
def test_a_head_of_few_bits_is_rounded_by_its_inputs(tmp_path: Path, family: str) -> None:
    models.write_model(tmp_path / "model", *models.EVERY[family])
    source = open_source(tmp_path / "model")
    floats = TensorFolder.open(tmp_path / "model")

    def read(name: str, rows: slice | None = None) -> torch.Tensor:
        return torch.from_numpy(floats.floats(name, rows))

    norm = read(decoder.last_norm(source.spec))
    passes = float_passes(source.spec, calibration_of(), read, no_progress, "head")
    hessian = sum(second_moments(decoder.final_norm(source.spec, norm, hidden)) for hidden in passes)
    lost = {}
    for method in ("rtn", "gptq"):
        text = None if method == "rtn" else calibration_of()
        weights = neutral_weights(source, ALL_S4, calibration=text, store=ContentStore(tmp_path / "store"))
        name = head_name(source.spec)
        lost[method] = lost_outputs(torch.from_numpy(weights.tensor(name)) - read(name), hessian)
    assert lost["gptq"] < 0.9 * lost["rtn"]


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
    rounded = gptq([weights], inputs.T @ inputs, S4)[0]
    values = dequantise(*rounded)
    assert torch.isfinite(values).all()
    assert (values - weights).square().sum() < 0.2 * weights.square().sum()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_integers_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    weights, inputs = torch.randn(50, 64) * 0.05, torch.randn(300, 64)
    hessian = inputs.T @ inputs
    before = torch.get_num_threads()
    expected = gptq([weights], hessian, S4)[0]
    try:
        torch.set_num_threads(threads)
        found = gptq([weights], hessian, S4)[0]
    finally:
        torch.set_num_threads(before)
    assert (found.scales - expected.scales).abs().max() < 1e-3
    assert (found.integers != expected.integers).float().mean() < 0.02


@pytest.mark.parametrize(
    "family", ["llama", "llama untied, with biases", "qwen3", "phi3", "gemma2", "gemma3", "smollm3", "gemma4"]
)
def test_awq_folding_does_not_change_a_layers_output(tmp_path: Path, family: str) -> None:
    kind, config = models.EVERY[family]
    models.write_model(tmp_path, kind, config)
    spec, stored = models.spec_of(tmp_path), TensorFolder.open(tmp_path)
    tensors = decoder.layer_tensors(spec, 1, lambda name: torch.from_numpy(stored.floats(name)))
    hidden, ids = torch.randn(2, 20, spec.hidden_size), torch.arange(40).reshape(2, 20)

    def read(name: str, rows: slice | None = None) -> torch.Tensor:
        return torch.from_numpy(stored.floats(name, rows))

    side_inputs = decoder.layer_inputs(spec, ids, hidden, read)
    before = decoder.layer_forward(spec, 1, tensors, hidden, side_inputs=side_inputs)
    head_dim = spec.layers[1].head_dim
    for fold in awq.folds_of(spec, 1):
        width = tensors[f"{fold.linears[0]}.weight"].shape[1]
        factors = awq.average_over_heads(torch.rand(width) + 0.5, fold.repeats, head_dim)
        awq.fold_in(spec, fold, tensors, factors, head_dim)
    after = decoder.layer_forward(spec, 1, tensors, hidden, side_inputs=side_inputs)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_matrices_are_rounded_alike_alone_and_together() -> None:
    matrices, inputs = [torch.randn(rows, 64) * 0.05 for rows in (48, 16, 17)], torch.randn(300, 64)
    hessian = inputs.T @ inputs
    together = gptq(matrices, hessian, S4)
    for matrix, found in zip(matrices, together, strict=True):
        alone = gptq([matrix], hessian, S4)[0]
        assert found.integers.shape == matrix.shape
        assert (found.integers != alone.integers).float().mean() < 0.02


def test_second_moments_divide_tokens_by_their_length() -> None:
    inputs = torch.randn(2, 3, 4)
    inputs[0, 1] = 0
    rows = inputs.flatten(0, 1)
    expected = sum(torch.outer(row, row) / row.norm().clamp(min=1e-30) for row in rows)
    torch.testing.assert_close(second_moments(inputs), expected)


@pytest.fixture(scope="module")
def demo_logits() -> tuple[Any, Any, Any]:
    """The bundled model, some held-out text, and the float model's logits for it."""
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
                store=ContentStore(tmp_path),
            ),
            tokens,
            expected,
        )
        for method in ("rtn", "gptq")
    }
    assert kl["gptq"] < 0.5 * kl["rtn"], kl


def test_a_budget_is_kept_and_nearly_spent(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["qwen3"]
    models.write_model(tmp_path / "model", kind, config)
    recipe = named_recipe("s4-g64").model_copy(update={"name": "to 5.5", "bits_per_weight": 5.5})
    weights = neutral_weights(
        tmp_path / "model", recipe, calibration=calibration_of(), method="rtn", store=ContentStore(tmp_path / "store")
    )
    formats = {str(weights.format_of(module)) for module in weights.modules()}
    assert formats == {"s8", "s4-g64"}
    used = bits_per_weight(weights.model, weights.recipe)
    assert 5.2 < used <= 5.5
    assert weight_bytes(weights.model, weights.recipe) <= (budget_bytes(recipe, weights.model) or 0)
    assert "promoted to s8" in weights.manifest.notes[0]
    again = neutral_weights(
        tmp_path / "model", recipe, calibration=calibration_of(), method="rtn", store=ContentStore(tmp_path / "other")
    )
    assert again.sha256 == weights.sha256


def test_a_budget_below_the_rules_measures_no_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass of the whole model would choose among no linears."""
    kind, config = models.FAMILIES["qwen3"]
    models.write_model(tmp_path / "model", kind, config)
    monkeypatch.setattr(quantise, "predicted_losses", lambda *_, **__: pytest.fail("losses were measured"))
    recipe = named_recipe("s4-g64").model_copy(update={"name": "to 2", "bits_per_weight": 2.0})
    weights = neutral_weights(
        tmp_path / "model", recipe, calibration=calibration_of(), method="rtn", store=ContentStore(tmp_path / "store")
    )
    assert any("the rules alone take" in note for note in weights.manifest.notes)
    assert weights.recipe.rules == recipe.rules


def test_linears_that_servers_hold_as_one_tensor_are_promoted_together(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["qwen3"]
    models.write_model(tmp_path / "model", kind, config)
    base = handover(named_recipe("s4-g64"))
    spec = open_source(tmp_path / "model").spec
    budget = bits_per_weight(spec, base) + 1.0
    recipe = base.model_copy(update={"bits_per_weight": budget})
    weights = neutral_weights(
        tmp_path / "model", recipe, calibration=calibration_of(), method="rtn", store=ContentStore(tmp_path / "store")
    )
    refuse_split(weights.model, weights.recipe)
    assert {str(weights.format_of(module)) for module in weights.modules()} == {"float16", "s8", "s4-g64"}
    assert bits_per_weight(weights.model, weights.recipe) <= budget


def test_the_balanced_recipe_counts_its_budget_over_the_linears_alone(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["llama"]
    models.write_model(tmp_path / "model", kind, config)
    weights = neutral_weights(
        tmp_path / "model",
        named_recipe("balanced"),
        calibration=calibration_of(),
        store=ContentStore(tmp_path / "store"),
    )
    linears = [tensor for tensor in weights.model.tensors() if tensor.role == "linear"]
    used = sum(weights.recipe.format_of(tensor).bytes(tensor.shape) for tensor in linears)
    assert 5.1 < used * 8 / sum(tensor.size for tensor in linears) <= 5.5
    assert {str(weights.format_of(tensor.module)) for tensor in linears} == {"s8", "s4-g32"}


def test_experts_that_few_tokens_reach_are_rounded_to_nearest(tmp_path: Path) -> None:
    """gptq rounds the others by the tokens that reach them, which loses less of their outputs."""
    kind, config = models.EXPERTS["qwen3_moe"]
    models.write_model(tmp_path / "model", kind, {**config, "num_experts": 24, "num_experts_per_tok": 1})
    made = {
        method: quantise.neutral_weights(
            tmp_path / "model", named_recipe("s4-g32"), method=method,
            calibration=calibration_of(), store=ContentStore(tmp_path / "store"),
        )
        for method in ("gptq", "rtn")
    }  # fmt: skip
    experts = [module for module in made["gptq"].modules() if ".experts." in module]
    nearest = [module for module in experts if made["gptq"].manifest.statistics[module].output_error is None]
    assert 0 < len(nearest) < len(experts)
    ignored = json.loads((made["gptq"].folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert {f"model.layers.{index}.mlp.gate" for index in range(3)} <= set(ignored)
    (note,) = [note for note in made["gptq"].manifest.notes if "experts" in note]
    assert note.startswith(f"{len(nearest):,} of {len(experts):,} matrices of experts were rounded to nearest")
    for module in experts:
        alike = (made["gptq"].integers(module) == made["rtn"].integers(module)).all()
        assert alike == (module in nearest), module
    with pytest.raises(Unsupported, match="has experts"):
        quantise.neutral_weights(
            tmp_path / "model", named_recipe("s4-g32"), method="awq",
            calibration=calibration_of(), store=ContentStore(tmp_path / "store"),
        )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "llama untied, with biases", "phi3", "gemma2", "gemma4", "mixtral"])
def test_predicted_losses_are_those_of_autograd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(compute, "_has_bfloat16", lambda: False)  # as the products below
    kind, config = models.EVERY[family]
    models.write_model(tmp_path, kind, config)
    spec, stored = models.spec_of(tmp_path), TensorFolder.open(tmp_path)
    calibration = calibration_of(count=3)
    tensors = {tensor.name: torch.from_numpy(stored.floats(tensor.name)) for tensor in spec.tensors()}

    def read(name: str, rows: slice | None = None) -> torch.Tensor:
        return tensors[name] if rows is None else tensors[name][rows]

    ours = predicted_losses(ALL_S4, spec, calibration, read, no_progress)
    ids = torch.tensor(calibration.sequences)
    inputs: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str, values: torch.Tensor) -> None:
        outputs[name] = values
        values.retain_grad()

    hidden = at_embedding = decoder.embed(spec, tensors[f"{spec.prefix}embed_tokens.weight"][ids]).requires_grad_()
    side_inputs = decoder.layer_inputs(spec, ids, hidden.detach(), read)
    for index in range(len(spec.layers)):
        prefix = f"{spec.prefix}layers.{index}."
        hidden = decoder.layer_forward(
            spec,
            index,
            decoder.layer_tensors(spec, index, tensors.__getitem__),
            hidden,
            decoder.Hooks(
                lambda name, values, prefix=prefix: inputs.__setitem__(prefix + name, values.detach()),  # type: ignore[misc]
                lambda name, values, prefix=prefix: keep(prefix + name, values),  # type: ignore[misc]
            ),
            side_inputs,
        )
    matrix = f"{spec.prefix}embed_tokens.weight" if spec.tied else f"{spec.head}.weight"
    logits = decoder.head(spec, tensors[f"{spec.prefix}norm.weight"], tensors[matrix], hidden)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()

    read_again = {f"{spec.prefix}layers.{spec.kv_owner(index)}.self_attn.k_proj" for index in range(len(spec.layers))}
    first = "self_attn.o_proj" if spec.experts else "mlp.down_proj"  # experts are not promoted
    for linear in (f"{spec.prefix}layers.0.{first}", *sorted(read_again & outputs.keys())):
        gradient = outputs[linear].grad
        assert gradient is not None
        weights = tensors[f"{linear}.weight"]
        moved = inputs[linear] @ (dequantise(*round_to_nearest(weights, S4)) - weights).T
        expected = 0.5 * float((moved * gradient).sum(-1).square().mean())
        assert ours[linear] == pytest.approx(expected, rel=5e-3)
    linears = {t.module for t in spec.tensors() if t.role == "linear" and t.name.startswith(f"{spec.prefix}layers.")}
    assert set(ours) == {*linears, matrix.removesuffix(".weight")}
    rows = tensors[matrix]
    coarse = dequantise(*round_to_nearest(rows, S4))
    moved = (decoder.head(spec, tensors[f"{spec.prefix}norm.weight"], coarse, hidden) - logits).detach()
    shares = logits[:, :-1].softmax(-1).detach()
    expected = float(((shares * moved[:, :-1].square()).sum(-1) - (shares * moved[:, :-1]).sum(-1).square()).mean())
    if spec.tied:
        first = decoder.embed(spec, (coarse - rows)[ids]) * at_embedding.grad
        expected += float(first.sum(-1).square().mean())
    assert ours[matrix.removesuffix(".weight")] == pytest.approx(0.5 * expected, rel=5e-2)  # softcaps are not linear


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_pieces_predict_the_losses_of_the_whole_and_read_weights_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    models.write_model(tmp_path, *models.EVERY[family])
    spec, stored = models.spec_of(tmp_path), TensorFolder.open(tmp_path)
    reads: Counter[str] = Counter()

    def losses(piece_bytes: int) -> Mapping[str, float]:
        monkeypatch.setattr("edgekit.quant.backward.PIECE_BYTES", piece_bytes)
        reads.clear()
        return predicted_losses(named_recipe("s4-g32"), spec, calibration_of(count=3), read, no_progress)

    def read(name: str, rows: slice | None = None) -> torch.Tensor:
        reads[name] += 1
        whole = torch.from_numpy(stored.floats(name))
        return whole if rows is None else whole[rows]

    whole, linear = losses(1 << 30), f"{spec.prefix}layers.1.mlp.down_proj"
    assert reads[f"{linear}.weight"] == 2  # forward and backward
    assert losses(1) == pytest.approx(whole, rel=1e-3)  # a sequence at a time
    assert reads[f"{linear}.weight"] == 2
    monkeypatch.setattr("edgekit.quant.sensitivity.PIECES", 2)
    assert losses(1) == pytest.approx(whole, rel=1e-3)
    assert reads[f"{linear}.weight"] == 4  # batches of two sequences and of one


def test_sensitivity_is_measured_once_for_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, config = models.FAMILIES["llama"]
    models.write_model(tmp_path / "model", kind, config)
    calls: list[int] = []
    whole = quantise.predicted_losses
    monkeypatch.setattr(quantise, "predicted_losses", lambda *given, **named: calls.append(1) or whole(*given, **named))

    def stop(done: float, total: float, what: str) -> None:
        if what.startswith("neutral weights: layer 1"):
            raise StoppedError

    options = {"calibration": calibration_of(), "store": ContentStore(tmp_path / "store")}
    with pytest.raises(StoppedError):
        neutral_weights(tmp_path / "model", named_recipe("balanced"), progress=stop, **options)  # type: ignore[arg-type]
    neutral_weights(tmp_path / "model", named_recipe("balanced"), **options)  # type: ignore[arg-type]
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), r"layers\.1\.input_layernorm\.weight.*not finite"),
        (float("inf"), r"layers\.1\.input_layernorm\.weight.*not finite"),
        (3e38, r"(layers\.[12]\..*|the head: .*)(not finite|does not fit)"),
    ],
)
@pytest.mark.parametrize("recipe", [named_recipe("s4-g32"), ALL_S4, ALL_S4.model_copy(update={"bits_per_weight": 6.0})])
def test_calibration_through_a_damaged_norm_ends_in_one_line(
    tmp_path: Path, value: float, said: str, recipe: Recipe
) -> None:
    kind, config = models.FAMILIES["llama"]
    models.write_model(tmp_path / "model", kind, config)
    norm = "model.layers.1.input_layernorm.weight"
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors[norm][0] = value
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InvalidInput, match=said):
        neutral_weights(
            tmp_path / "model", recipe, calibration=calibration_of(), store=ContentStore(tmp_path / "store")
        )


def test_small_models_may_have_a_larger_budget() -> None:
    small, large = open_source("demo").spec, shapes.spec_of(shapes.LLAMA_32_1B)
    balanced = named_recipe("balanced")
    plain = balanced.model_copy(update={"small_model_linear_bits": None})
    assert (budget_bytes(balanced, small) or 0) > (budget_bytes(plain, small) or 0)
    assert budget_bytes(balanced, large) == budget_bytes(plain, large)


def test_a_method_that_needs_text_is_refused_without_it(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["llama"]
    models.write_model(tmp_path / "model", kind, config)
    with pytest.raises(InvalidInput, match="gptq needs calibration text"):
        neutral_weights(
            tmp_path / "model", named_recipe("s4-g32"), method="gptq", store=ContentStore(tmp_path / "store")
        )


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3", "gemma4"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibrated_weights_are_whole_and_measured(tmp_path: Path, family: str, method: Any) -> None:
    kind, config = models.EVERY[family]
    models.write_model(tmp_path / "model", kind, config)
    told: list[str] = []
    weights = neutral_weights(
        tmp_path / "model",
        named_recipe("s4-g32"),
        method=method,
        calibration=calibration_of(),
        store=ContentStore(tmp_path / "store"),
        progress=lambda done, total, what: told.append(what),
    )
    weights.verify()
    assert weights.manifest.method == method
    assert weights.manifest.calibration is not None
    measured = [item.output_error for item in weights.manifest.statistics.values() if item.output_error is not None]
    in_layers = f"{weights.model.prefix}layers."
    linears = [t for t in weights.model.tensors() if t.role == "linear" and t.name.startswith(in_layers)]
    assert len(measured) == len(linears)
    assert all(0 <= error < 0.2 for error in measured)
    assert any("layer 1 (rounding error of the last one" in what for what in told)


def _quantise(model: Path, store: Path, told: Any, answer: Any) -> None:
    torch.set_num_threads(1)

    def progress(done: float, total: float, what: str) -> None:
        told.value += what.startswith("neutral weights")

    weights = neutral_weights(
        model,
        named_recipe("s4-g32"),
        method="gptq",
        calibration=calibration_of(),
        store=ContentStore(store),
        progress=progress,
    )
    answer.put(weights.sha256)


@pytest.mark.slow
def test_run_killed_at_random_moments_resumes_to_the_same_bytes(tmp_path: Path) -> None:
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
    while kills < 3:
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
    assert not list(stores[-1].glob(".*.part"))


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_run_stopped_after_any_part_resumes_to_the_same_bytes(tmp_path: Path, method: Any) -> None:
    kind, config = models.FAMILIES["llama"]
    models.write_model(tmp_path / "model", kind, config)
    text = None if method == "rtn" else calibration_of()

    def run(store: str, stop_at: int | None = None) -> NeutralWeights:
        told = 0

        def progress(done: float, total: float, what: str) -> None:
            nonlocal told
            told += what.startswith("neutral weights")
            if told == stop_at:
                raise StoppedError

        return neutral_weights(
            tmp_path / "model",
            named_recipe("s4-g32"),
            method=method,
            calibration=text,
            store=ContentStore(tmp_path / store),
            progress=progress,
        )

    expected = run("whole")
    for stop_at in (2, 3, 4, 5, 6):
        with pytest.raises(StoppedError):
            run("stopped", stop_at)
        parts = list((tmp_path / "stopped").glob(".*.part/*.safetensors"))
        assert len(parts) == stop_at - 1
    found = run("stopped")
    assert found.sha256 == expected.sha256
    assert (found.folder / "edgekit.json").read_bytes() == (expected.folder / "edgekit.json").read_bytes()


@pytest.mark.parametrize(
    "step", ["write_index", "write_file", "copy_companions", "file_sha256", "remove_working_files"]
)
@pytest.mark.parametrize("after", [0, 1])
def test_run_stopped_while_sealing_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: int
) -> None:
    kind, config = models.FAMILIES["llama"]
    models.write_model(tmp_path / "model", kind, config)
    expected = neutral_weights(tmp_path / "model", named_recipe("s4-g32"), store=ContentStore(tmp_path / "whole"))
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
        if after == 0 or step not in (
            "write_index",
            "copy_companions",
            "remove_working_files",
        ):  # these are called once
            with pytest.raises(StoppedError):
                neutral_weights(tmp_path / "model", named_recipe("s4-g32"), store=ContentStore(tmp_path / "store"))
            (partial,) = (tmp_path / "store").glob(".*.part")
            (partial / ".model-00001-of-00004.safetensors.k1ll3d.part").write_bytes(b"half a shard")
    found = neutral_weights(tmp_path / "model", named_recipe("s4-g32"), store=ContentStore(tmp_path / "store"))
    assert found.sha256 == expected.sha256
    assert sorted(path.name for path in found.folder.iterdir()) == sorted(
        path.name for path in expected.folder.iterdir()
    )


CAPPED = """
import resource, sys, threading, time
from pathlib import Path
from edgekit.contracts.recipe import named_recipe
from edgekit.common.content_store import ContentStore
from edgekit.quant.pipeline import neutral_weights
import torch
from safetensors.torch import load_file, save_file

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
neutral_weights(Path(sys.argv[1]), named_recipe("s4-g32"), store=ContentStore(Path(sys.argv[2])))
print(peak - base)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rounding_never_holds_the_whole_model(tmp_path: Path) -> None:
    """The limit on private memory is far below the model, and below its largest tensor in float32."""
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


def test_recipes_may_be_custom_rules(tmp_path: Path) -> None:
    from edgekit.common.parsing import read_yaml

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
    weights = neutral_weights(tmp_path / "model", read_yaml(path, Recipe), store=ContentStore(tmp_path / "store"))
    assert str(weights.format_of("model.layers.0.mlp.down_proj")) == "s8"
    assert str(weights.format_of("model.layers.0.mlp.up_proj")) == "s4-g32"
    assert TensorFolder.open(weights.folder).entry("model.norm.weight").dtype == "BF16"
