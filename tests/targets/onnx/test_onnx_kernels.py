"""Products on arm64 take the kernels that round as x86's do, unless speed is asked for; exact mode always."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

import family_models as models
from edgekit_onnx import OnnxTarget
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.kernels import DISABLES_KLEIDIAI, KLEIDIAI, MLAS, arm_kernels
from edgekit_onnx.sessions import options

from edgekit.contracts.recipe import named_recipe
from edgekit.device.load import load_profile
from edgekit.errors import Unsupported
from edgekit.model.families import model_from_config

pytestmark = pytest.mark.onnx
MODEL = model_from_config({"model_type": "llama", **models.SMALL}, "llama", "test")


@pytest.mark.parametrize(
    ("machine", "setting", "kernels"),
    [("x86_64", "on", ""), ("aarch64", "", MLAS), ("arm64", "off", MLAS), ("aarch64", "on", KLEIDIAI)],
)
def test_kleidiai_is_used_only_on_arm64_and_on_request(
    monkeypatch: pytest.MonkeyPatch, machine: str, setting: str, kernels: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setenv("EDGEKIT_KLEIDIAI", setting)
    assert arm_kernels() == kernels
    is_disabled = options(1).get_session_config_entry(DISABLES_KLEIDIAI)
    assert is_disabled == ("0" if kernels == KLEIDIAI else "1")


def test_exact_mode_is_refused_with_kleidiai(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setenv("EDGEKIT_KLEIDIAI", "on")
    with pytest.raises(Unsupported, match="unset EDGEKIT_KLEIDIAI"):
        OnnxEngine(models.plan_for(MODEL, named_recipe("s4-g32")), tmp_path, exact=True)


@pytest.mark.parametrize("device", ["raspberry-pi-5-8gb", "laptop-x86-16gb"])
def test_plan_notes_the_kernels_of_a_device(device: str) -> None:
    notes = {offer.recipe.name: offer.notes for offer in OnnxTarget().offers(MODEL, load_profile(device))}
    assert any("KleidiAI" in note for note in notes["s4-g32"]) == (device == "raspberry-pi-5-8gb")
    assert notes["s8"] == notes["float32"] == ()
