"""Any sound model exports: what a narrow cache costs is a figure, and models that predict nothing are named."""

from __future__ import annotations

import re
from pathlib import Path

import family_models as models
import numpy as np
import outliers
import pytest

pytest.importorskip("torch")

import edgekit
from edgekit.artifact.artifact import open_artifact
from edgekit.artifact.export import ExportOptions, export
from edgekit.common.progress import Reporter
from edgekit.contracts.plan import MAX_KV_KL
from edgekit.errors import DoesNotFit, InvalidInput, Unsupported
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest

pytestmark = pytest.mark.quantize
DEVICES = {"onnx": "laptop-x86-8gb", "llamacpp": "laptop-x86-8gb", "mlx": "macbook-m4-16gb", "executorch": "pixel-9"}
FACTOR = 30.0
QUICK = ("llama untied, with biases", "qwen3", "gemma3", "phi3")


def targets(*others: pytest.MarkDecorator) -> list[object]:
    """Return the targets; `others` are marks of those whose programs take long to lower."""
    return [
        pytest.param(name, marks=[getattr(pytest.mark, name), *(others if name == "executorch" else ())])
        for name in DEVICES
    ]


def exported(folder: Path, model: Path, target: str, kv_bits: int | None = None) -> tuple[edgekit.Artifact, list[str]]:
    said: list[str] = []
    wish = PlanRequest(target=target, context=128, kv_bits=kv_bits)
    plan = make_plans(str(model), [DEVICES[target]], wish)[0]
    return export(plan, folder, ExportOptions(report=Reporter(warn=said.append))), said


@pytest.mark.parametrize("target", targets(pytest.mark.slow))
def test_key_biases_cost_narrow_caches_and_refuse_no_export(tmp_path: Path, target: str) -> None:
    model = outliers.biased(tmp_path / "model", 3000.0, "demo-draft")
    made, said = exported(tmp_path / "out", model, target, kv_bits=8 if target == "executorch" else None)
    costs = {
        int(bits): float(kl) for bits, kl in re.findall(r"(\d+) bits (?:costs )?KL ([\d.]+)", made.manifest.self_check)
    }
    costly = dict(made.plan.costly_kv)
    assert costly and set(costly) == {bits for bits, kl in costs.items() if kl > MAX_KV_KL}
    assert bool(said) == (target == "executorch")
    if target == "executorch":
        assert "a KV cache of 8 bits costs this model a KL of" in said[0]
        return
    narrow = min(costly)
    assert any(f"{narrow} bits costs" in note and "left out" in note for note in made.plan.all_notes)
    with pytest.raises(Unsupported, match=rf"{narrow} bits costs this model a KL of .*--kv-bits {narrow} to have it"):
        edgekit.open(made.folder, kv_bits=narrow)
    with pytest.raises(Unsupported, match="cannot store 5 bits") as unknown:
        edgekit.open(made.folder, kv_bits=5)
    assert f" {narrow}" not in str(unknown.value)
    with pytest.raises(DoesNotFit) as refused:
        edgekit.open(made.folder, memory="1MiB")
    assert f"→ {narrow}" not in str(refused.value.table)


@pytest.mark.mlx
def test_a_costly_cache_that_was_asked_for_is_given_with_a_warning(tmp_path: Path) -> None:
    model = outliers.biased(tmp_path / "model", 3000.0, "demo-draft")
    made, said = exported(tmp_path / "out", model, "mlx", kv_bits=4)
    assert len(said) == 1 and "a KV cache of 4 bits costs this model a KL of" in said[0]
    with edgekit.open(made.folder) as opened:
        assert opened.kv_config.kv_bits == 4


@pytest.mark.onnx
@pytest.mark.parametrize("fault", ["all weights zero", "no logit varies", "not finite"])
def test_a_model_that_predicts_nothing_is_named(tmp_path: Path, fault: str) -> None:
    def change(name: str, values: np.ndarray) -> None:  # type: ignore[type-arg]
        if fault == "all weights zero":
            values[:] = 0
        elif "lm_head" in name and fault == "no logit varies":
            values[:] = 1
        elif "lm_head" in name:
            values[:] = np.float32(3e38)

    model = outliers.biased(tmp_path / "model", 1.0, "demo-draft")
    outliers.rewrite(model, change)
    wish = PlanRequest(target="onnx", recipe=models.named_recipe("float32"), context=128)
    plan = make_plans(str(model), [DEVICES["onnx"]], wish)[0]
    with pytest.raises(InvalidInput, match=r"the model's logits (do not vary|are not finite)"):
        export(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", targets(pytest.mark.slow, pytest.mark.long))
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow, pytest.mark.long]) for name in models.EVERY],
)
def test_outliers_in_any_family_export_on_every_target(tmp_path: Path, target: str, family: str) -> None:
    """The targets that offer the family at all, with default options but for calibration."""
    model = outliers.family(tmp_path / "model", *models.EVERY[family], FACTOR)
    try:
        made, _ = exported(tmp_path / "out", model, target)
    except (DoesNotFit, Unsupported) as refused:
        pytest.skip(str(refused))
    assert open_artifact(made.folder).manifest.self_check.startswith("KL ")
