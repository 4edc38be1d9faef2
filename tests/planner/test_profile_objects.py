"""Plans and exports take a device profile itself, not only its name."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgekit
from edgekit.device.catalogue import UnknownDevice

BOARD = "raspberry-pi-5-8gb"


def test_a_profile_plans_as_its_name_does() -> None:
    profile = edgekit.load_profile(BOARD)
    kiosk = profile.model_copy(update={"name": "kiosk"})
    named = edgekit.plan("demo", BOARD)
    assert edgekit.plan("demo", profile) == named
    first, second = edgekit.plan("demo", [profile, kiosk])
    assert first == named
    assert (second.device, second.estimate) == ("kiosk", named.estimate)


def test_an_export_takes_a_profile(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    kiosk = edgekit.load_profile(BOARD).model_copy(update={"name": "kiosk"})
    made = edgekit.export(
        "demo-draft", tmp_path / "kiosk", kiosk, context=64, recipe="s8", effort="quick", store=tmp_path / "store"
    )
    assert made.manifest.plan.device == "kiosk"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownDevice, match="did you mean raspberry-pi-5-8gb"):
        edgekit.load_profile("raspbery-pi-5-8gb")
