"""What the mlx target writes is the neutral weights, bit for bit, and mlx-lm opens it as its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
import mlx_models
from edgekit_mlx import MlxTarget
from edgekit_mlx.config import differences, mlx_config, quantization_of
from edgekit_mlx.export import export
from edgekit_mlx.layout import WEIGHTS, Packing, module_on_disk, packing_of
from edgekit_mlx.native import quantise

from edgekit.errors import InvalidInput, Unsupported
from edgekit.model import Tensor
from edgekit.recipe import NATIVE_RECIPES, Format, named_recipe
from edgekit.testing import check_weights
from edgekit.weights.neutral import NeutralWeights, is_module, on_disk
from edgekit.weights.packing import bf16_to_float32
from edgekit.weights.safetensors import TensorFolder

pytestmark = [pytest.mark.mlx, pytest.mark.quantize]

PARAMETERS = [
    ("llama", "s4-g32"),
    ("llama untied, with biases", "s4-g64"),
    ("qwen3", "s8"),
    ("phi3", "float16"),
    ("gemma3", "s4-g128"),
]


@pytest.mark.parametrize("backend", ["cpu", "metal"])
@pytest.mark.parametrize(("family", "recipe"), PARAMETERS)
def test_every_word_scale_and_float_is_the_neutral_one(family: str, recipe: str, backend: str) -> None:
    made = mlx_models.made(family, recipe, backend)
    with TensorFolder.open(made.files) as stored:
        names = set(stored.entries)
        for tensor in made.weights.model.tensors():
            name, module = on_disk(made.weights.model, tensor.name), module_on_disk(made.weights.model, tensor)
            if not is_module(tensor) or made.weights.format_of(tensor.module).is_float:
                np.testing.assert_array_equal(stored.floats(name), made.weights.tensor(tensor.name))
                names.remove(name)
                continue
            assert stored.array(name).tobytes() == made.weights.packed(tensor.module).tobytes()
            scales, biases = stored.floats(f"{module}.scales"), stored.floats(f"{module}.biases")
            bits = 4 if made.weights.format_of(tensor.module).kind == "s4" else 8
            neutral = made.weights.scales(tensor.module)
            np.testing.assert_array_equal(scales, np.repeat(neutral, scales.shape[1] // neutral.shape[1], axis=1))
            np.testing.assert_array_equal(biases, -(2.0 ** (bits - 1)) * scales)
            assert stored.entry(f"{module}.scales").dtype == ("F32" if backend == "cpu" else "F16")
            names -= {name, f"{module}.scales", f"{module}.biases"}
        assert names == set()


@pytest.mark.parametrize("backend", ["cpu", "metal"])
@pytest.mark.parametrize(("family", "recipe"), PARAMETERS)
def test_the_target_reads_back_the_weights_that_it_packed(family: str, recipe: str, backend: str) -> None:
    made = mlx_models.made(family, recipe, backend)
    check_weights(MlxTarget(), made.plan, made.files, made.weights)


@pytest.mark.parametrize("family", mlx_models.FAMILIES)
def test_plain_mlx_lm_says_what_the_dequantised_weights_say(family: str) -> None:
    pytest.importorskip("mlx_lm")
    import mlx.core as mx
    from mlx_lm.utils import load_model

    made = mlx_models.made(family)
    model, _ = load_model(made.files)
    # Within the windows that its classes ignore; longrope only where its long factors are right.
    tokens = mlx_models.tokens_of(100 if "longrope" in family or not differences(made.plan.model, 256) else 12)
    found = np.array(model(mx.array([tokens]))[0])
    assert mlx_models.apart(found, mlx_models.expected(family, tokens)) < 1e-5


def test_plain_mlx_lm_generates_from_the_exported_demo(tmp_path: Path) -> None:
    mlx_lm = pytest.importorskip("mlx_lm")
    made = demo(tmp_path, "cpu")
    model, tokenizer = mlx_lm.load(str(made))
    text = mlx_lm.generate(model, tokenizer, "def fibonacci(n):", max_tokens=8)
    assert isinstance(text, str) and text


def demo(folder: Path, backend: str, recipe: str = "s4-g64") -> Path:
    from edgekit.source import open_source
    from edgekit.store import Store
    from edgekit.weights.quantise import neutral_weights

    source = open_source("demo", need_weights=True)
    weights = neutral_weights(source, named_recipe(recipe), store=Store(folder / "store"))
    out = folder / f"demo-{backend}"
    out.mkdir()
    export(models.plan_for(weights.model, weights.recipe, backend=backend, context=512), weights, out, models.quiet)
    return out


def test_the_folder_holds_what_loaders_look_for(tmp_path: Path) -> None:
    names = sorted(path.name for path in demo(tmp_path, "metal").iterdir())
    assert {"config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(names)
    assert not [name for name in names if name.startswith(".")]


def test_exporting_loads_neither_mlx_nor_torch(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "sys.modules['mlx'] = sys.modules['mlx.core'] = sys.modules['torch'] = None\n"
        "import pathlib, edgekit_mlx, edgekit_mlx.export, edgekit_mlx.offers\n"
        "from edgekit.weights.neutral import NeutralWeights\n"
        "from edgekit.reading import read_json, validate\n"
        "from edgekit.plan import Plan\n"
        "plan = Plan.model_validate_json(pathlib.Path(sys.argv[3]).read_text())\n"
        "out = pathlib.Path(sys.argv[4]); out.mkdir()\n"
        "edgekit_mlx.MlxTarget().export(plan, NeutralWeights.open(sys.argv[2]), out, lambda *_: None)\n"
        "print(sorted(path.name for path in out.iterdir()))\n"
    )
    made = mlx_models.made("llama")
    plan = tmp_path / "plan.json"
    plan.write_text(made.plan.to_json())
    arguments = [str(Path(__file__).parent), str(made.weights.folder), str(plan), str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert WEIGHTS in done.stdout, done.stderr
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (made.files / WEIGHTS).read_bytes()


def test_small_blocks_of_rows_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing larger than a block is ever held, and where a block ends makes no difference."""
    made = mlx_models.made("llama")
    monkeypatch.setattr("edgekit_mlx.export._BLOCK_VALUES", 100)
    export(made.plan, made.weights, tmp_path, models.quiet)
    assert (tmp_path / WEIGHTS).read_bytes() == (made.files / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("inputs", "kind", "expected"),
    [
        (256, Format(kind="s8"), Packing(8, 128)),
        (704, Format(kind="s8"), Packing(8, 64)),
        (96, Format(kind="s8"), Packing(8, 32)),
        (256, Format(kind="s4", group=32), Packing(4, 32)),
        (256, Format(kind="s4", group=64), Packing(4, 64)),
        (96, Format(kind="affine3", group=64), Packing(3, 32)),
        (96, Format(kind="mxfp4", group=32), Packing(4, 32, "mxfp4")),
        (48, Format(kind="nvfp4", group=16), Packing(4, 16, "nvfp4")),
        (64, Format(kind="float16"), None),
    ],
    ids=str,
)
def test_groups_are_the_largest_that_divide_a_row(inputs: int, kind: Format, expected: Packing | None) -> None:
    assert packing_of(Tensor("a.weight", (8, inputs), "linear"), kind) == expected


@pytest.mark.parametrize("kind", [Format(kind="s8"), Format(kind="mxfp4", group=32)], ids=str)
def test_a_row_that_no_group_divides_is_refused_by_name(kind: Format) -> None:
    with pytest.raises(Unsupported, match="down_proj has 40 inputs"):
        packing_of(Tensor("down_proj.weight", (8, 40), "linear"), kind)


def test_the_commonest_packing_is_the_rule_and_all_others_are_named() -> None:
    four, eight = Packing(4, 64), Packing(8, 128)
    found = quantization_of({"a": four, "b": four, "c": eight, "d": None})
    assert found == {"group_size": 64, "bits": 4, "mode": "affine", "c": eight.config(), "d": False}
    assert eight.config() == {"group_size": 128, "bits": 8, "mode": "affine"}
    assert quantization_of({"a": None}) is None


@pytest.mark.parametrize("family", ["llama 3 rope, wide heads", "llama with yarn", "phi3 with longrope", "gemma3"])
def test_positions_are_written_in_both_spellings_and_read_back_the_same(family: str) -> None:
    made = mlx_models.made(family)
    config = json.loads((made.files / "config.json").read_text())
    assert "rope_theta" in config and "rope_parameters" in config
    assert "quantization_config" not in config
    for spelling in ("rope_parameters", "rope_scaling"):
        one = {key: value for key, value in config.items() if key != spelling}
        if family != "gemma3" or spelling == "rope_scaling":
            found = models.model_from_config(one, made.plan.model.name, spelling)
            assert found.ropes == made.plan.model.ropes


def test_code_and_other_quantisers_settings_never_go_along() -> None:
    made = mlx_models.made("llama")
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
    ],
)
def test_what_mlx_lm_would_do_otherwise_is_said(family: str, context: int, said: str) -> None:
    found = "; ".join(differences(mlx_models.made(family).plan.model, context))
    assert (said in found) if said else found == ""


def float_weights(folder: Path, family: str = "llama") -> NeutralWeights:
    made = mlx_models.made(family)
    return models.weights_of(made.folder, "float32", folder / "floats")


@pytest.mark.parametrize("recipe", NATIVE_RECIPES)
def test_native_formats_are_read_by_mlx_and_lose_no_more_than_its_own(tmp_path: Path, recipe: str) -> None:
    mx = pytest.importorskip("mlx.core")
    random = np.random.default_rng(3)
    values = (random.standard_normal((48, 192)) * 0.05).astype(np.float32)
    values[3], values[4, :64] = 0.0, 7.0  # rows that hold one value only
    tensor = Tensor("a.weight", values.shape, "linear")
    packing = packing_of(tensor, NATIVE_RECIPES[recipe].rules[0].format)
    assert packing is not None
    ours = quantise(values, packing, "F16")
    options = {"group_size": packing.group, "bits": packing.bits, "mode": packing.mode}
    biases = [] if ours.biases is None else [mx.array(ours.biases)]
    read = np.array(mx.dequantize(mx.array(ours.words), mx.array(ours.scales), *biases, **options).astype(mx.float32))
    theirs = mx.dequantize(*mx.quantize(mx.array(values).astype(mx.float16), **options), **options)
    lost, allowed = np.square(read - values).sum(), np.square(np.array(theirs.astype(mx.float32)) - values).sum()
    assert lost <= allowed * 1.01


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "affine3", "affine6"])
def test_native_recipes_open_in_mlx_lm_and_here_alike(tmp_path: Path, recipe: str) -> None:
    pytest.importorskip("mlx_lm")
    import mlx.core as mx
    from edgekit_mlx.engine import MlxEngine
    from mlx_lm.utils import load_model

    weights = float_weights(tmp_path)
    plan = models.plan_for(weights.model, named_recipe(recipe))
    out = tmp_path / "out"
    out.mkdir()
    export(plan, weights, out, models.quiet)
    model, _ = load_model(out)
    tokens = mlx_models.tokens_of(40)
    engine = MlxEngine(plan, out)
    found = mlx_models.fed(engine, engine.start(plan.storage), tokens, [16])
    engine.close()
    assert mlx_models.apart(found, np.array(model(mx.array([tokens]))[0])) < 1e-5


def test_a_native_recipe_is_exported_from_the_float_model_and_checked_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgekit.export import export as export_artifact
    from edgekit.planning import find_recipe, make_plans
    from edgekit.resolve import Wish

    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    plan = make_plans("demo", ["macbook-m4-16gb"], Wish(target="mlx", recipe=find_recipe("mxfp4")))[0]
    artifact = export_artifact(plan, tmp_path / "demo")
    assert artifact.plan.recipe.name == "mxfp4"
    assert "a vendor's own format is not read back" in artifact.manifest.self_check
    assert "leaves the common weights" in " ".join(artifact.plan.notes)
    with pytest.raises(InvalidInput, match="takes no --calibrate or --method"):
        export_artifact(plan, tmp_path / "other", method="rtn")


def test_native_recipes_need_the_float_model(tmp_path: Path) -> None:
    made = mlx_models.made("llama")
    plan = made.plan.model_copy(update={"recipe": named_recipe("mxfp4")})
    with pytest.raises(InvalidInput, match="mxfp4 is quantised from the float model, and these weights are s4-g32"):
        export(plan, made.weights, tmp_path, models.quiet)


def test_bfloat16_scales_are_exact_too(tmp_path: Path) -> None:
    made = mlx_models.made("llama")
    recipe = made.weights.recipe.model_copy(update={"float_format": Format(kind="bfloat16")})
    weights = models.weights_of(made.folder, recipe, tmp_path / "store")
    export(models.plan_for(weights.model, recipe, backend="metal"), weights, tmp_path, models.quiet)
    with TensorFolder.open(tmp_path / WEIGHTS) as stored:
        name = "model.layers.0.mlp.down_proj"
        assert stored.entry(f"{name}.scales").dtype == "BF16"
        np.testing.assert_array_equal(bf16_to_float32(stored.array(f"{name}.scales")), weights.scales(name))
        np.testing.assert_array_equal(stored.floats(f"{name}.biases"), -8 * weights.scales(name))


def test_a_bias_beyond_float16_is_refused_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = mlx_models.made("llama")
    real = NeutralWeights.scales

    def large(self: NeutralWeights, module: str, rows: Any = None) -> Any:
        return real(self, module, rows) * np.float32(2.0**20)

    monkeypatch.setattr(NeutralWeights, "scales", large)
    plan = made.plan.model_copy(update={"backend": "metal"})
    with pytest.raises(InvalidInput, match=r"beyond float16.*bfloat16"):
        export(plan, made.weights, tmp_path, models.quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_family_that_mlx_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    made = mlx_models.made("llama")
    other = made.plan.model.model_copy(update={"family": "gemma4_text"})
    with pytest.raises(Unsupported, match="no family gemma4_text"):
        export(made.plan.model_copy(update={"model": other}), made.weights, tmp_path, models.quiet)
