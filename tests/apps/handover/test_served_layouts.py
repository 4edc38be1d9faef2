"""Layouts that servers load: the experts of a mixture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from family_models import EXPERTS, write_model

from edgekit.apps.handover.served_models import handover, refuse_split
from edgekit.cli import command
from edgekit.contracts.recipe import Format, Rule, named_recipe
from edgekit.errors import Unsupported
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.source import open_source

pytestmark = pytest.mark.quantize


def handed_over(*arguments: object) -> None:
    result = CliRunner().invoke(command, ["handover", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def quantisation_of(weights: Path) -> dict[str, Any]:
    section: dict[str, Any] = json.loads((weights / "config.json").read_text())["quantization_config"]
    return section


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_handed_over_under_their_published_names(family: str, tmp_path: Path) -> None:
    kind, config = EXPERTS[family]
    demo = open_source("demo")
    write_model(tmp_path / "model", kind, {**config, "vocab_size": demo.spec.vocab_size})
    for path in demo.tokenizer_files:
        shutil.copy(path, tmp_path / "model")
    handed_over(tmp_path / "model", "--to", "vllm", "--gpu", "L4", "--effort", "quick", "-r", "s4-g32",
                "--context", 64, "-o", tmp_path / "out")  # fmt: skip
    published = {name for name in TensorFolder.open(tmp_path / "model").entries if ".experts." in name}
    assert len(published) >= 3 * 3 * 4
    stored = TensorFolder.open(tmp_path / "out" / "weights")
    for name in published:
        module = name.removesuffix(".weight")
        assert stored.entry(f"{module}.weight_packed")
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
