"""Layouts that servers load: the experts of a mixture, and 8-bit integers whose inputs are rounded too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from compressed_tensors.quantization import QuantizationConfig
from family_models import EXPERTS, write_model

from edgekit.apps.handover.fp8 import round_activations
from edgekit.apps.handover.reference import input_rounding
from edgekit.apps.handover.served_models import handover, refuse_split
from edgekit.apps.handover.server_plan import ServerPlan
from edgekit.cli import command
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.recipe import Format, Recipe, Rule, named_recipe
from edgekit.errors import EdgekitError, Unsupported
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.source import open_source
from edgekit.quant import reference_decoder

pytestmark = pytest.mark.quantize

MIXED = """
name: mixed
rules:
- {pattern: '*.down_proj', format: {kind: s8}}
- {pattern: '*', format: {kind: s4, group: 64}}
"""


def handed_over(*arguments: object) -> None:
    result = CliRunner().invoke(command, ["handover", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def refusal(*arguments: object) -> str:
    result = CliRunner().invoke(command, ["handover", *map(str, arguments)])
    assert isinstance(result.exception, EdgekitError), result.exception
    return str(result.exception)


def quantisation_of(weights: Path) -> dict[str, Any]:
    section: dict[str, Any] = json.loads((weights / "config.json").read_text())["quantization_config"]
    return section


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with 4-bit integers, and 8-bit ones with 8-bit inputs."""
    place = tmp_path_factory.mktemp("int8")
    (place / "mixed.yaml").write_text(MIXED)
    handed_over("demo", "--to", "vllm", "--gpu", "L4", "--effort", "quick", "-r", place / "mixed.yaml",
                "--activation-format", "int8", "-o", place / "bundle")  # fmt: skip
    return place / "bundle"


def test_each_group_of_a_mixed_bundle_names_its_layout(mixed: Path) -> None:
    known = QuantizationConfig.model_validate(quantisation_of(mixed / "weights"))
    assert known.format == "mixed-precision"
    by_bits = {group.weights.num_bits: group for group in known.config_groups.values()}
    assert by_bits[4].format == "pack-quantized" and by_bits[4].input_activations is None
    assert by_bits[8].format == "int-quantized" and by_bits[8].weights.strategy == "channel"
    inputs = by_bits[8].input_activations
    assert inputs.dynamic is True and inputs.strategy == "token" and inputs.num_bits == 8 and inputs.symmetric


def test_8_bit_inputs_change_no_integer(mixed: Path, tmp_path: Path) -> None:
    (tmp_path / "mixed.yaml").write_text(MIXED)
    handed_over("demo", "--to", "vllm", "--gpu", "L4", "--effort", "quick", "-r", tmp_path / "mixed.yaml",
                "-o", tmp_path / "plain")  # fmt: skip
    plain, stored = NeutralWeights.open(tmp_path / "plain" / "weights"), TensorFolder.open(mixed / "weights")
    name = "model.layers.1.mlp.down_proj"
    assert (stored.array(f"{name}.weight") == plain.integers(name)).all()
    assert (stored.floats(f"{name}.weight_scale") == plain.scales(name)).all()
    untouched = "model.layers.1.mlp.up_proj.weight_packed"
    assert (stored.array(untouched) == TensorFolder.open(plain.folder).array(untouched)).all()
    assert not (mixed / "neutral").exists() and not [name for name in stored.entries if "down_proj.weight_p" in name]
    ours, theirs = ((place / "reference.json").read_text() for place in (tmp_path / "plain", mixed))
    assert ours != theirs  # the reference rounds inputs as the server does
    assert ServerPlan.model_validate_json((mixed / "plan.json").read_bytes()).activation_format == "int8"


def test_transformers_opens_a_mixed_bundle(mixed: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shutil.copytree(mixed / "weights", tmp_path / "weights")
    config = json.loads((tmp_path / "weights" / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group.pop("input_activations", None)  # the weights alone are compared
    (tmp_path / "weights" / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32).eval()
    source = open_source("demo", need_weights=True).spec
    stored = TensorFolder.open(mixed / "weights")

    def dequantised(name: str) -> torch.Tensor:
        if f"{name}_scale" in stored.entries and name in stored.entries:
            return torch.from_numpy(stored.array(name) * stored.floats(f"{name}_scale"))
        return model.get_parameter(name).detach()

    tokens = [1, 5, 900, 77, 3000, 12]
    with torch.inference_mode():
        found = model(torch.tensor([tokens])).logits[0]
    expected = reference_decoder.logits(source, dequantised, tokens)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_only_inputs_that_the_server_rounds_are_rounded() -> None:
    model = open_source("demo").spec
    rules = (
        Rule(pattern="*.down_proj", format=Format(kind="s8")),
        Rule(pattern="*.o_proj", format=Format(kind="fp8")),
        Rule(pattern="*", format=Format(kind="s4", group=32)),
    )
    recipe = Recipe(name="three", rules=rules)
    given = torch.tensor([[0.301, -0.2, 0.1004], [900.0, 1.0, 3.6]])
    in_fp8 = given.clone()
    round_activations("", in_fp8)
    in_int8 = torch.tensor([[127, -84, 42], [127, 0, 1]]) * (given.amax(-1, keepdim=True) / 127)
    for chosen, of_down in (("int8", in_int8), ("auto", given)):
        observe = input_rounding(model, recipe, chosen)  # type: ignore[arg-type]
        for name, wanted in (("mlp.down_proj", of_down), ("self_attn.o_proj", in_fp8), ("mlp.up_proj", given)):
            seen = given.clone()
            observe(f"model.layers.0.{name}", seen)
            assert torch.allclose(seen, wanted, rtol=1e-6), (chosen, name)
    assert input_rounding(model, named_recipe("s8"), "auto") is reference_decoder.ignore


def test_8_bit_inputs_are_refused_where_nothing_takes_them() -> None:
    order = "demo", "--to", "vllm", "--activation-format", "int8"
    assert "recipe s4-g32-handover stores no linear as s8" in refusal(*order, "-r", "s4-g32")
    assert "8-bit activations on b200, which is blackwell" in refusal(*order, "-r", "s8", "--gpu", "B200")
    handed_over(*order, "-r", "s8", "--gpu", "A100")
    handed_over(*order, "-r", "balanced")  # its budget promotes linears to s8


def test_fp8_beside_integers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "both.yaml").write_text(MIXED.replace("kind: s8", "kind: fp8"))
    assert "mixes fp8 with integers" in refusal("demo", "--to", "vllm", "-r", tmp_path / "both.yaml")


def test_quantised_weights_and_drafts_get_8_bit_inputs_too(mixed: Path, tmp_path: Path) -> None:
    floats = (
        "rules:\n- {pattern: '*embed_tokens*', format: {kind: float16}}\n- {pattern: lm_head, format: {kind: float16}}"
    )
    (tmp_path / "mixed.yaml").write_text(MIXED.replace("rules:", floats))
    made = ["quantize", "demo", "-r", tmp_path / "mixed.yaml", "--effort", "quick", "-o", tmp_path / "own"]
    assert CliRunner().invoke(command, list(map(str, made))).exit_code == 0
    handed_over(tmp_path / "own", "--to", "sglang", "--gpu", "L4", "--activation-format", "int8",
                "--draft", "demo-draft", "--effort", "quick", "-o", tmp_path / "out")  # fmt: skip
    ours, theirs = (TensorFolder.open(place / "weights") for place in (tmp_path / "out", mixed))
    assert set(ours.entries) == set(theirs.entries)
    assert all((ours.array(name) == theirs.array(name)).all() for name in ours.entries)
    draft = quantisation_of(tmp_path / "out" / "draft")
    assert draft["format"] in ("mixed-precision", "int-quantized") and not (tmp_path / "out" / "neutral").exists()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("recipe", ["s4-g32", "fp8"])
def test_experts_are_handed_over_under_their_published_names(family: str, recipe: str, tmp_path: Path) -> None:
    kind, config = EXPERTS[family]
    demo = open_source("demo")
    write_model(tmp_path / "model", kind, {**config, "vocab_size": demo.spec.vocab_size})
    for path in demo.tokenizer_files:
        shutil.copy(path, tmp_path / "model")
    effort = () if recipe == "fp8" else ("--effort", "quick")
    handed_over(tmp_path / "model", "--to", "vllm", "--gpu", "L4", *effort, "-r", recipe,
                "--context", 64, "-o", tmp_path / "out")  # fmt: skip
    published = {name for name in TensorFolder.open(tmp_path / "model").entries if ".experts." in name}
    assert len(published) >= 3 * 3 * 4
    stored = TensorFolder.open(tmp_path / "out" / "weights")
    for name in published:
        module = name.removesuffix(".weight")
        assert stored.entry(f"{module}.weight" if recipe == "fp8" else f"{module}.weight_packed")
        assert stored.entry(f"{module}.weight_scale")
    section = quantisation_of(tmp_path / "out" / "weights")
    (group,) = section["config_groups"].values()
    assert group["targets"] == ["Linear"]  # vLLM reads this rule for the layers that hold experts too
    routers = [name for name in section["ignore"] if name.endswith("gate")]
    assert len(routers) == 3 and all(f"{name}.weight" in stored.entries for name in routers)
    steps = json.loads((tmp_path / "out" / "reference.json").read_text())["answers"][0]["steps"]
    assert steps and all(np.isfinite(step["log_probability"]) for step in steps)


def test_experts_of_one_layer_need_one_format(tmp_path: Path) -> None:
    kind, config = EXPERTS["qwen3_moe"]
    write_model(tmp_path / "model", kind, config)
    spec = open_source(tmp_path / "model").spec
    refuse_split(spec, handover(named_recipe("s4-g32")))
    down = Rule(pattern="*.experts.*.down_proj", format=Format(kind="s8"))
    recipe = named_recipe("s4-g32").model_copy(update={"name": "two", "rules": (down, *named_recipe("s4-g32").rules)})
    with pytest.raises(Unsupported, match=r"hold .*experts\.0\.gate_proj s4-g32, .*experts\.0\.down_proj s8 as one"):
        refuse_split(spec, handover(recipe))
