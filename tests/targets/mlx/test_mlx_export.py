"""The mlx target writes a folder that mlx-lm opens, with every spelling that it reads, and notes where it differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
from edgekit_mlx.config import differences, mlx_config, quantization_of
from edgekit_mlx.export import export
from edgekit_mlx.layout import WEIGHTS, MlxPacking, packing_of
from edgekit_mlx.native import quantise
from engines import apart, fed, mlx_model
from mxfp4_stacks import write_mxfp4
from safetensors.numpy import save_file

from edgekit.common.content_store import ContentStore
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.recipe import NATIVE_RECIPES, Format, Recipe, Rule, named_recipe
from edgekit.errors import InvalidInput, Unsupported
from edgekit.formats.int_packing import bf16_to_float32
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.source import open_source
from edgekit.model.tensors import Tensor
from edgekit.quant.pipeline import neutral_weights

pytestmark = [pytest.mark.mlx, pytest.mark.quantize]

# mlx-lm cannot compute these, which notes say.
UNLIKE_MLX_LM = ("gpt_oss, all experts, tied", "arcee", "glm")


@pytest.mark.parametrize("family", [family for family in models.EVERY if family not in UNLIKE_MLX_LM])
def test_mlx_lm_logits_equal_dequantised_weights(family: str) -> None:
    pytest.importorskip("mlx_lm")
    import mlx.core as mx
    from mlx_lm.utils import load_model

    made = mlx_model(family)
    model, _ = load_model(made.files)
    # Within the windows that its classes ignore; longrope only where its long factors are right.
    tokens = models.tokens_of(100 if "longrope" in family or not differences(made.plan.model, 256) else 12)
    found = np.array(model(mx.array([tokens]))[0])
    bound = 2e-5 if "qwen3_5" in family else 1e-5  # its recurrence, summed by mlx-lm: 1.07e-5 with AVX-512
    assert apart(found, mlx_model(family).logits(tokens)) < bound


def test_mlx_lm_generates_from_exported_demo(tmp_path: Path) -> None:
    mlx_lm = pytest.importorskip("mlx_lm")
    source, made = open_source("demo", need_weights=True), tmp_path / "demo"
    weights = neutral_weights(source, named_recipe("s4-g64"), store=ContentStore(tmp_path / "store"))
    made.mkdir()
    export(models.plan_for(weights.model, weights.recipe, context=512), weights, made, models.quiet)
    model, tokenizer = mlx_lm.load(str(made))
    text = mlx_lm.generate(model, tokenizer, "def fibonacci(n):", max_tokens=8)
    assert isinstance(text, str) and text
    names = {path.name for path in made.iterdir()}
    assert {"config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    assert not [name for name in names if name.startswith(".")]


def test_block_size_does_not_change_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written in blocks, and the block size does not change the file."""
    made = mlx_model("llama")
    monkeypatch.setattr("edgekit_mlx.export._BLOCK_VALUES", 100)
    export(made.plan, made.weights, tmp_path, models.quiet)
    assert (tmp_path / WEIGHTS).read_bytes() == (made.files / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("inputs", "kind", "expected"),
    [
        (256, Format(kind="s8"), MlxPacking(8, 128)),
        (704, Format(kind="s8"), MlxPacking(8, 64)),
        (96, Format(kind="s8"), MlxPacking(8, 32)),
        (256, Format(kind="s4", group=32), MlxPacking(4, 32)),
        (256, Format(kind="s4", group=64), MlxPacking(4, 64)),
        (96, Format(kind="s3", group=32), MlxPacking(3, 32)),
        (96, Format(kind="mxfp4", group=32), MlxPacking(4, 32, "mxfp4")),
        (48, Format(kind="nvfp4", group=16), MlxPacking(4, 16, "nvfp4")),
        (64, Format(kind="float16"), None),
    ],
    ids=str,
)
def test_group_is_largest_divisor_of_row(inputs: int, kind: Format, expected: MlxPacking | None) -> None:
    assert packing_of(Tensor("a.weight", (8, inputs), "linear"), kind) == expected


@pytest.mark.parametrize("kind", [Format(kind="s8"), Format(kind="mxfp4", group=32)], ids=str)
def test_indivisible_row_is_refused(kind: Format) -> None:
    with pytest.raises(Unsupported, match="down_proj has 40 inputs"):
        packing_of(Tensor("down_proj.weight", (8, 40), "linear"), kind)


def test_most_common_packing_is_default() -> None:
    four, eight = MlxPacking(4, 64), MlxPacking(8, 128)
    found = quantization_of({"a": four, "b": four, "c": eight, "d": None})
    assert found == {"group_size": 64, "bits": 4, "mode": "affine", "c": eight.config(), "d": False}
    assert eight.config() == {"group_size": 128, "bits": 8, "mode": "affine"}
    assert quantization_of({"a": None}) is None


@pytest.mark.parametrize("family", ["llama 3 rope, wide heads", "llama with yarn", "phi3 with longrope", "gemma3"])
def test_positions_are_written_in_both_spellings(family: str) -> None:
    made = mlx_model(family)
    config = json.loads((made.files / "config.json").read_text())
    assert "rope_theta" in config and "rope_parameters" in config
    assert "quantization_config" not in config
    for spelling in ("rope_parameters", "rope_scaling"):
        one = {key: value for key, value in config.items() if key != spelling}
        if family != "gemma3" or spelling == "rope_scaling":
            found = models.model_from_config(one, made.plan.model.name, spelling)
            assert found.ropes == made.plan.model.ropes


def test_remote_code_and_foreign_quantisation_are_dropped() -> None:
    made = mlx_model("llama")
    source = {"model_file": "evil.py", "auto_map": {"AutoModel": "evil.Model"}, "quantization_config": {"bits": 2}}
    found = mlx_config(source, made.plan.model, {}, "F16")
    assert not {"model_file", "auto_map", "quantization_config", "quantization"} & set(found)


@pytest.mark.parametrize(
    ("family", "context", "said"),
    [
        ("llama", 4096, ""),
        ("mistral with a window", 12, ""),
        ("mistral with a window", 13, "ignores the window of 12"),
        ("qwen2 with windows", 64, "ignores the window of 12"),
        ("gemma2", 64, "ignores the window of 12"),
        ("gemma3", 64, ""),
        ("phi3 with longrope", 64, "long factors"),
        ("phi3 with longrope", 65, ""),
        ("lfm2", 64, ""),
        ("lfm2_moe", 64, ""),
        ("qwen3_5", 64, ""),
        ("gpt_oss", 64, ""),
        ("arcee", 64, "no class for arcee"),
        ("glm", 64, "rotates whole heads"),
        (UNLIKE_MLX_LM[0], 64, "a swiglu_limit of 7"),
        (UNLIKE_MLX_LM[0], 64, "has a head of its own"),
        (UNLIKE_MLX_LM[0], 64, "has biases in its attention"),
        (UNLIKE_MLX_LM[0], 64, "rounds the range"),
    ],
)
def test_differences_from_mlx_lm_are_noted(family: str, context: int, said: str) -> None:
    found = "; ".join(differences(mlx_model(family).plan.model, context))
    assert (said in found) if said else found == ""


def test_hybrids_that_mlx_lm_computes_otherwise_are_noted() -> None:
    model = mlx_model("qwen3_5").plan.model
    linear, attending = model.layers[:2]
    other = model.model_copy(update={"layers": (linear, attending, attending, linear)})
    assert "attention that repeats every few layers" in "; ".join(differences(other, 64))
    model = mlx_model("lfm2").plan.model
    turned = model.ropes["default"].model_copy(update={"kind": "linear", "factor": 2.0})
    other = model.model_copy(update={"tied": False, "ropes": {"default": turned}})
    assert {note.split()[2] for note in differences(other, 64)} == {"has", "ignores"}


@pytest.mark.parametrize("recipe", NATIVE_RECIPES)
def test_native_formats_lose_no_more_than_mlx(tmp_path: Path, recipe: str) -> None:
    mx = pytest.importorskip("mlx.core")
    random = np.random.default_rng(3)
    values = (random.standard_normal((48, 192)) * 0.05).astype(np.float32)
    values[3], values[4, :64] = 0.0, 7.0  # rows that hold one value only
    tensor = Tensor("a.weight", values.shape, "linear")
    packing = packing_of(tensor, NATIVE_RECIPES[recipe].rules[0].format)
    assert packing is not None
    ours = quantise(values, packing)
    options = {"group_size": packing.group, "bits": packing.bits, "mode": packing.mode}
    read = np.array(mx.dequantize(mx.array(ours.words), mx.array(ours.scales), **options).astype(mx.float32))
    theirs = mx.dequantize(*mx.quantize(mx.array(values).astype(mx.float16), **options), **options)
    lost, allowed = np.square(read - values).sum(), np.square(np.array(theirs.astype(mx.float32)) - values).sum()
    assert lost <= allowed * 1.01


@pytest.mark.parametrize("recipe", NATIVE_RECIPES)
def test_native_recipes_agree_with_mlx_lm(tmp_path: Path, recipe: str) -> None:
    pytest.importorskip("mlx_lm")
    import mlx.core as mx
    from edgekit_mlx.engine import MlxEngine
    from mlx_lm.utils import load_model

    weights = models.weights_of(mlx_model("llama").folder, "float32", tmp_path / "floats")
    plan = models.plan_for(weights.model, named_recipe(recipe))
    out = tmp_path / "out"
    out.mkdir()
    export(plan, weights, out, models.quiet)
    model, _ = load_model(out)
    tokens = models.tokens_of(40)
    engine = MlxEngine(plan, out)
    found = fed(engine, engine.start(plan.storage), tokens, [16])
    engine.close()
    assert apart(found, np.array(model(mx.array([tokens]))[0])) < 1e-5


def test_published_mxfp4_experts_keep_their_values(tmp_path: Path) -> None:
    """Values of four bits with a power of two are rounded to themselves, so mlx computes the published model."""
    from edgekit_mlx.engine import MlxEngine

    _, floats = write_mxfp4(tmp_path / "model")
    weights = models.weights_of(tmp_path / "model", "float32", tmp_path / "store")
    experts = Rule(pattern="*.experts.*", format=Format(kind="mxfp4", group=32))
    recipe = Recipe(name="published", rules=(experts,), float_format=Format(kind="float32"))
    plan, out = models.plan_for(weights.model, recipe), tmp_path / "out"
    out.mkdir()
    export(plan, weights, out, models.quiet)
    models.write_model(tmp_path / "plain", *models.EXPERTS["gpt_oss"])
    save_file(floats, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    floats_of = models.weights_of(tmp_path / "plain", "float32", tmp_path / "two")
    theirs = models.reference_of(tmp_path / "plain", floats_of)
    engine, tokens = MlxEngine(plan, out), models.tokens_of(40)
    found = fed(engine, engine.start(plan.storage), tokens, [16])
    engine.close()
    assert apart(found, models.logits_of(theirs, tokens)) < 1e-5


def test_native_recipe_needs_float_weights_and_takes_no_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgekit.artifact.export import ExportOptions, export as export_artifact
    from edgekit.planner.make import make_plans
    from edgekit.planner.request import PlanRequest, find_recipe

    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    plan = make_plans("demo", ["macbook-m4-16gb"], PlanRequest(target="mlx", recipe=find_recipe("mxfp4")))[0]
    with pytest.raises(InvalidInput, match="takes no --calibrate or --method"):
        export_artifact(plan, tmp_path / "other", ExportOptions(method="rtn"))
    made = mlx_model("llama")
    with pytest.raises(InvalidInput, match="mxfp4 is quantised from the float model, and these weights are s4-g32"):
        export(made.plan.model_copy(update={"recipe": plan.recipe}), made.weights, tmp_path, models.quiet)


def test_bfloat16_scales_are_exact(tmp_path: Path) -> None:
    made = mlx_model("llama")
    recipe = made.weights.recipe.model_copy(update={"float_format": Format(kind="bfloat16")})
    weights = models.weights_of(made.folder, recipe, tmp_path / "store")
    export(models.plan_for(weights.model, recipe, backend="metal"), weights, tmp_path, models.quiet)
    with TensorFolder.open(tmp_path / WEIGHTS) as stored:
        name = "model.layers.0.mlp.down_proj"
        assert stored.entry(f"{name}.scales").dtype == "BF16"
        np.testing.assert_array_equal(bf16_to_float32(stored.array(f"{name}.scales")), weights.scales(name))
        np.testing.assert_array_equal(stored.floats(f"{name}.biases"), -8 * weights.scales(name))


def test_bias_beyond_float16_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = mlx_model("llama")
    real = NeutralWeights.scales

    def large(self: NeutralWeights, module: str, rows: Any = None) -> Any:
        return real(self, module, rows) * np.float32(2.0**20)

    monkeypatch.setattr(NeutralWeights, "scales", large)
    plan = made.plan.model_copy(update={"backend": "metal"})
    with pytest.raises(InvalidInput, match=r"beyond float16.*bfloat16"):
        export(plan, made.weights, tmp_path, models.quiet)
    assert list(tmp_path.iterdir()) == []
