"""Integers chosen by other tools are kept bit for bit: in neutral weights and in every target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import family_models as models
import quantised_folders as folders
from quantised_folders import Integers

from edgekit.common.content_store import ContentStore
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import KEEP, Format, bits_per_weight, named_recipe, weight_bytes
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported
from edgekit.formats.gguf import GgufFile
from edgekit.formats.int_packing import unpack
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.gguf_source import open_gguf_tensors
from edgekit.model.source import open_source, open_tensors
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target
from edgekit.quant.own_integers import own_integers
from edgekit.quant.pipeline import neutral_weights
from edgekit.testing import check_weights

pytestmark = [pytest.mark.quantize, pytest.mark.usefixtures("home")]

DEVICE = "laptop-x86-16gb"
# Name → layout, options of the folder, the format of a layer's linears, and what a plan says of it.
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "W4A16": ("compressed-tensors", {}, "s4-g32", "W4A16, groups of 32"),
    "W4A16 in float16": ("compressed-tensors", {"dtype": "F16", "group": 64}, "s4-g64", "W4A16, groups of 64"),
    "W4A16 by rows": ("compressed-tensors", {"group": None}, "s4-g64", "W4A16, groups of 64"),
    "W8A16 by rows": ("compressed-tensors", {"bits": 8, "group": None}, "s8", "W8A16, a scale for each row"),
    "W8A16 in groups": ("compressed-tensors", {"bits": 8}, "s8-g32", "W8A16, groups of 32"),
    "W4A16, signed": ("compressed-tensors", {"signed": True}, "s4-g32", "W4A16, groups of 32"),
    "GPTQ": ("gptq", {"dtype": "F16"}, "s4-g32", "GPTQ 4-bit, groups of 32"),
    "GPTQ, 8 bits by rows": ("gptq", {"dtype": "F16", "bits": 8, "group": None}, "s8", "GPTQ 8-bit, a scale"),
    "MLX": ("mlx", {"dtype": "F16", "group": 64, "signed": True}, "s4-g64", "MLX 4-bit, groups of 64"),
    "MLX, 8 bits": ("mlx", {"dtype": "F32", "bits": 8}, "s8-g32", "MLX 8-bit, groups of 32"),
    "Q4_0": ("gguf", {}, "s4-g32", "Q4_0, groups of 32; Q8_0, groups of 32"),
    # Groups add a minimum: a zero point times the scale, or a float.
    "W4A16, zero points": ("compressed-tensors", {"zeros": True}, "s4-g32 with minima", "W4A16, groups of 32"),
    "GPTQ, zero points": ("gptq", {"dtype": "F16", "zeros": True}, "s4-g32 with minima", "GPTQ 4-bit, groups of 32"),
    "AWQ": ("awq", {"dtype": "F16", "group": 64, "zeros": True}, "s4-g64 with minima", "AWQ 4-bit, groups of 64"),
    "MLX, biases": ("mlx", {"group": 64, "zeros": True}, "s4-g64 with minima", "MLX 4-bit, groups of 64"),
    "Q4_1": ("gguf", {"linears": "Q4_1"}, "s4-g32 with minima", "Q4_1, groups of 32; Q8_0, groups of 32"),
}
WITH_MINIMA = [case for case, (_, _, stored, _) in CASES.items() if stored.endswith("minima")]


def written(case: str, tmp_path: Path) -> tuple[Path, dict[str, Integers]]:
    layout, options, _, _ = CASES[case]
    if layout == "gguf":
        return tmp_path / "tiny.gguf", folders.write_gguf(tmp_path / "tiny.gguf", **options)
    return tmp_path / "tiny", folders.write(tmp_path / "tiny", layout, **options)


def kept(model: Path, tmp_path: Path) -> NeutralWeights:
    source = open_source(model, need_weights=True)
    own = own_integers(source)
    assert own is not None
    return neutral_weights(source, own.recipe, store=ContentStore(tmp_path / "store"))


def assert_same(found_integers: Any, found_scales: Any, expected: Integers) -> None:
    """The same integers, and the same scale for every value, whatever group a target repeats it for."""
    assert np.array_equal(found_integers, expected.integers)
    width = expected.integers.shape[1]
    found, wanted = (np.repeat(each, width // each.shape[1], axis=1) for each in (found_scales, expected.scales))
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("case", CASES)
def test_integers_and_scales_are_unchanged(case: str, tmp_path: Path) -> None:
    model, expected = written(case, tmp_path)
    weights = kept(model, tmp_path)
    weights.verify()
    for name, held in expected.items():
        module = name.removesuffix(".weight")
        assert_same(weights.integers(module), weights.scales(module), held)
        assert np.array_equal(weights.tensor(name), held.floats)
    assert str(weights.format_of("model.layers.0.self_attn.q_proj")) == CASES[case][2]
    assert (weights.manifest.method, weights.manifest.version) == ("kept", 4 if case in WITH_MINIMA else 3)
    assert all(item.weight_error == 0 for item in weights.manifest.statistics.values())


@pytest.mark.parametrize("case", CASES)
def test_plan_notes_kept_integers_and_counts_their_bytes(case: str, tmp_path: Path) -> None:
    model, _ = written(case, tmp_path)
    (plan,) = make_plans(str(model), [DEVICE], PlanRequest(context=64, target="onnx"))
    assert plan.recipe.name == "keep"
    assert CASES[case][3] in plan.notes[0] and "not rounded again" in plan.notes[0]
    weights = kept(model, tmp_path)
    stored = sum(file.bytes for name, file in weights.manifest.files.items() if name.endswith(".safetensors"))
    assert weight_bytes(plan.model, plan.recipe) == pytest.approx(stored, rel=0.2), "headers aside"
    assert plan.recipe == weights.recipe
    assert 4 < bits_per_weight(plan.model, plan.recipe) < 16


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq", "awq", "mlx"])
def test_a_config_without_weights_is_planned_alike(layout: str, tmp_path: Path) -> None:
    of_halves, zeros = layout in ("gptq", "awq"), layout in ("awq", "mlx")
    folders.write(tmp_path / "tiny", layout, dtype="F16" if of_halves else "BF16", zeros=zeros)
    request = PlanRequest(context=64, target="onnx")
    (with_weights,) = make_plans(str(tmp_path / "tiny"), [DEVICE], request)
    (tmp_path / "tiny" / "model.safetensors").unlink()
    (without,) = make_plans(str(tmp_path / "tiny"), [DEVICE], request)
    assert (without.recipe, without.estimate) == (with_weights.recipe, with_weights.estimate)


def test_recipe_rounds_again_with_a_note(tmp_path: Path) -> None:
    model, expected = written("Q4_0", tmp_path)
    (plan,) = make_plans(str(model), [DEVICE], PlanRequest(context=64, recipe=named_recipe("s8")))
    assert "rounded twice" in plan.notes[0]
    weights = neutral_weights(model, named_recipe("s8"), store=ContentStore(tmp_path / "store"))
    assert (weights.manifest.method, weights.manifest.version) == ("rtn", 2), "readers of before open these"
    name, held = next(iter(expected.items()))
    assert np.abs(weights.tensor(name) - held.floats).max() < np.abs(held.floats).max() / 127


def test_keep_needs_integers(tmp_path: Path) -> None:
    import tiny_models

    model = tiny_models.write_tiny(tmp_path / "float")
    with pytest.raises(InvalidInput, match=r"recipe keep: .*float is float, which has no integers to keep"):
        make_plans(str(model), [DEVICE], PlanRequest(context=64, recipe=KEEP))


def test_another_type_among_them_is_rounded_and_noted(tmp_path: Path) -> None:
    folders.write_gguf(tmp_path / "tiny.gguf", head="Q5_0")
    weights = kept(tmp_path / "tiny.gguf", tmp_path)
    assert weights.format_of("model.embed_tokens") == Format(kind="s8")
    note = "model.embed_tokens: stored as Q5_0, which is dequantised and rounded to s8"
    assert weights.manifest.notes[1:] == (note,)
    (plan,) = make_plans(str(tmp_path / "tiny.gguf"), [DEVICE], PlanRequest(context=64))
    assert note in plan.notes


def test_integers_that_no_target_of_a_device_holds_are_rounded_anew(tmp_path: Path) -> None:
    model, _ = written("Q4_1", tmp_path)
    for devices in (["pixel-9"], [DEVICE, "pixel-9"]):
        plans = make_plans(str(model), devices, PlanRequest(context=64))
        assert len({plan.recipe.name for plan in plans} - {"keep"}) == 1
        assert f"are not kept: no target for {' and '.join(devices)} holds them" in plans[0].notes[0]
    with pytest.raises(DoesNotFit, match="pixel-9"):
        make_plans(str(model), ["pixel-9"], PlanRequest(context=64, recipe=KEEP, target="executorch"))


@pytest.mark.onnx
def test_onnx_holds_minima_that_sixteen_bits_do_not(tmp_path: Path) -> None:
    """A group far from zero whose values differ little."""

    def shifted(tensors: folders.Tensors) -> None:
        name = "model.layers.0.self_attn.o_proj.biases"
        tensors[name] = ("F32", tensors[name][1] + np.float32(3.0))

    from edgekit_onnx import OnnxTarget

    model = tmp_path / "tiny"
    folders.write(model, "mlx", dtype="F32", zeros=True, changed=shifted)
    weights = kept(model, tmp_path)
    plan, out = exported("onnx", weights, tmp_path)
    check_weights(OnnxTarget(), plan, out, weights)


def test_floats_stay_in_their_type(tmp_path: Path) -> None:
    model, _ = written("W4A16", tmp_path)
    weights = kept(model, tmp_path)
    assert weights.format_of("model.embed_tokens") == Format(kind="bfloat16")
    with TensorFolder.open(model) as stored:
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            assert np.array_equal(weights.tensor(name), stored.floats(name))


@pytest.mark.onnx
@pytest.mark.parametrize("case", CASES)
def test_onnx_keeps_own_integers(case: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from edgekit_onnx import OnnxTarget
    from edgekit_onnx.unpacked import _Stored

    from edgekit.artifact.export import ExportOptions, export

    model, expected = written(case, tmp_path)
    (plan,) = make_plans(str(model), [DEVICE], PlanRequest(context=64, target="onnx"))
    artifact = export(plan, tmp_path / "out", ExportOptions(store=tmp_path / "store"))
    assert "bit for bit" in str(artifact.manifest.self_check)
    assert artifact.plan.quantisation is not None and artifact.plan.quantisation.method == "kept"
    check_weights(OnnxTarget(), artifact.plan, tmp_path / "out", kept(model, tmp_path))
    stored = _Stored(tmp_path / "out")
    for name, held in expected.items():
        module = name.removesuffix(".weight")
        if "embed" in module or module not in stored.products:
            continue  # joined with others; `check_weights` compares its values
        product = stored.products[module]
        rows = product.values.shape[0]
        width = product.values.size // rows * 8 // product.bits
        integers = unpack(np.ascontiguousarray(product.values).reshape(rows, -1).view(np.uint8), product.bits, width)
        assert_same(integers[:, : product.inputs], np.asarray(product.scales).reshape(rows, -1), held)


@pytest.mark.llamacpp
@pytest.mark.parametrize("case", CASES)
def test_llamacpp_keeps_own_integers_or_refuses_inexact_scales(case: str, tmp_path: Path) -> None:
    from edgekit_llamacpp import LlamaCppTarget
    from edgekit_llamacpp.export import export
    from edgekit_llamacpp.layout import WEIGHTS

    model, expected = written(case, tmp_path)
    weights = kept(model, tmp_path)
    (plan,) = make_plans(str(model), [DEVICE], PlanRequest(context=64, target="llamacpp"))
    assert plan.recipe == weights.recipe and plan.recipe.name == "keep"
    (tmp_path / "out").mkdir()
    if case == "MLX, 8 bits":
        with pytest.raises(
            Unsupported, match=r"embed_tokens has [\d,]+ scales that float16 does not hold.*--recipe s8"
        ):
            export(plan, weights, tmp_path / "out", models.quiet)
        return
    export(plan, weights, tmp_path / "out", models.quiet)
    check_weights(LlamaCppTarget(), plan, tmp_path / "out", weights)
    with open_gguf_tensors(tmp_path / "out" / WEIGHTS) as stored:
        for name, held in expected.items():
            found = stored.integers(name, slice(None))
            assert_same(found.integers - np.int16(8) * (found.minima is not None), found.scales, held)
            assert np.array_equal(stored.floats(name), held.floats)


@pytest.mark.llamacpp
def test_gguf_file_is_exported_to_llamacpp_with_the_same_blocks(tmp_path: Path) -> None:
    from edgekit_llamacpp import library
    from edgekit_llamacpp.layout import WEIGHTS

    from edgekit.artifact.export import ExportOptions, export

    if library.missing():
        pytest.skip(str(library.missing()))
    model, _ = written("Q4_0", tmp_path)
    (plan,) = make_plans(str(model), [DEVICE], PlanRequest(context=64, target="llamacpp"))
    artifact = export(plan, tmp_path / "out", ExportOptions(store=tmp_path / "store"))
    assert "read back bit for bit" in str(artifact.manifest.self_check)
    with GgufFile.open(model) as before, GgufFile.open(tmp_path / "out" / WEIGHTS) as after:
        for name, tensor in before.tensors.items():
            assert after.tensors[name].type_name == tensor.type_name, name
            assert np.array_equal(after.rows(name), before.rows(name)), name


@pytest.mark.parametrize(
    ("target", "case"),
    [pytest.param("mlx", case, marks=pytest.mark.mlx) for case in CASES]
    + [
        pytest.param("executorch", case, marks=[pytest.mark.executorch, pytest.mark.slow])
        for case in ("W4A16", "W8A16 by rows", "GPTQ, 8 bits by rows")
    ],
)
def test_other_targets_keep_own_integers(target: str, case: str, tmp_path: Path) -> None:
    model, expected = written(case, tmp_path)
    weights = kept(model, tmp_path)
    plan, out = exported(target, weights, tmp_path)
    check_weights(load_target(target), plan, out, weights)
    for name, values in load_target(target).weights(plan, out):
        assert name not in expected or np.array_equal(values, expected[name].floats)
    if target == "mlx":
        with TensorFolder.open(out) as stored:
            for name, held in expected.items():
                module, bits = name[:-7], 4 if str(weights.format_of(name[:-7])).startswith("s4") else 8
                words = np.ascontiguousarray(stored.array(name)).view(np.uint8)
                scales, biases = (stored.floats(f"{module}.{part}") for part in ("scales", "biases"))
                assert_same(unpack(words, bits, held.integers.shape[1]), scales, held)
                assert case in WITH_MINIMA or np.array_equal(biases, -(2.0 ** (bits - 1)) * scales)


def exported(target: str, weights: NeutralWeights, folder: Path) -> tuple[Plan, Path]:
    """A plan of a target for these weights, and its files."""
    if missing := load_target(target).missing():
        pytest.skip(missing)
    backend = "xnnpack" if target == "executorch" else "cpu"
    chosen = models.plan_for(weights.model, weights.recipe, backend=backend).model_copy(update={"target": target})
    (folder / "out").mkdir()
    load_target(target).export(chosen, weights, folder / "out", models.quiet)
    return chosen, folder / "out"


@pytest.mark.mlx
def test_an_mlx_artifact_is_a_source_of_the_same_integers(tmp_path: Path) -> None:
    model, expected = written("W4A16", tmp_path)
    _, out = exported("mlx", kept(model, tmp_path), tmp_path)
    again = kept(out, tmp_path)
    for name, held in expected.items():
        assert_same(again.integers(name[:-7]), again.scales(name[:-7]), held)


@pytest.mark.parametrize("case", ["GPTQ", "W8A16 in groups", "Q4_0", "AWQ"])
def test_executorch_refuses_unsupported_integers_by_name(case: str, tmp_path: Path) -> None:
    from edgekit_executorch.capabilities import capabilities

    model, _ = written(case, tmp_path)
    own = own_integers(open_source(model))
    assert own is not None
    reason = str(capabilities(open_source(model).spec, own.recipe, "xnnpack").refusal)
    assert reason.startswith("model.")
    assert CASES[case][3] in reason and "--recipe s8" in reason


def test_executorch_refuses_negative_scales_and_takes_them_in_eight_bits(tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    from edgekit_executorch.linears import linear

    model, _ = written("W4A16, signed", tmp_path)
    with pytest.raises(Unsupported, match=r"q_proj has \d+ scales that are negative or zero, .*--recipe s8"):
        linear(kept(model, tmp_path), "model.layers.0.self_attn.q_proj")
    anew = neutral_weights(model, named_recipe("s8"), store=ContentStore(tmp_path / "store"))
    assert linear(anew, "model.layers.0.self_attn.q_proj") is not None


def test_scales_that_a_target_would_round_are_refused(tmp_path: Path) -> None:
    """MLX on Metal stores scales in 16 bits: float32 ones that fit neither type are refused, not rounded."""
    from edgekit_mlx.export import export

    model, _ = written("MLX, 8 bits", tmp_path)
    weights = kept(model, tmp_path)
    recipe = weights.recipe.model_copy(update={"float_format": Format(kind="float16")})
    plan = models.plan_for(weights.model, recipe, backend="metal").model_copy(update={"target": "mlx"})
    (tmp_path / "out").mkdir()
    with pytest.raises(Unsupported, match=r"has scales that F16 does not hold"):
        export(plan, weights, tmp_path / "out", models.quiet)


def test_a_plan_of_other_integers_is_refused(tmp_path: Path) -> None:
    model, _ = written("W4A16", tmp_path)
    source = open_source(model, need_weights=True)
    own = own_integers(source)
    assert own is not None
    rule = own.recipe.rules[-1].model_copy(update={"format": Format(kind="s4", group=64, scales="bfloat16")})
    wrong = own.recipe.model_copy(update={"rules": (*own.recipe.rules[:-1], rule)})
    with pytest.raises(InvalidInput, match=r"the recipe keeps s4-g64, and the file has"):
        neutral_weights(source, wrong, store=ContentStore(tmp_path / "store"))


def test_older_formats_are_written_unchanged() -> None:
    """Recipes omit the new fields unless they need them, so older keys and plans stay valid."""
    assert json.loads(Format(kind="s4", group=32).model_dump_json()) == {"kind": "s4", "group": 32}
    assert "keeps" not in named_recipe("balanced").model_dump()


def test_dequantised_values_are_those_of_the_file(tmp_path: Path) -> None:
    """Recipes that round again, and evaluation, read the dequantised values."""
    for case in CASES:
        folder = tmp_path / case
        folder.mkdir()
        model, expected = written(case, folder)
        with open_tensors(model) as tensors:
            for name, held in expected.items():
                assert np.array_equal(tensors.floats(name, slice(3, 9)), held.floats[3:9])
