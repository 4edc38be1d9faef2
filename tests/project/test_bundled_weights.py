"""The bundled weights equal a new quantisation of the bundled models, and need no torch."""

from __future__ import annotations

import numpy as np
import pytest

from edgekit.api import calibration_for
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.recipe import Recipe
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.source import BUNDLED, ModelSource, open_source
from edgekit.planner.request import find_recipe
from edgekit.quant.calibration import Calibration
from edgekit.quant.pipeline import BUNDLED_WEIGHTS, bundled_key, neutral_weights


def inputs(name: str) -> tuple[ModelSource, Recipe, Calibration | None]:
    source, recipe = open_source(name, need_weights=True), find_recipe("balanced")
    return source, recipe, calibration_for(source, [recipe])


def test_bundled_weights_are_current_and_complete() -> None:
    """After a change of models, recipe, text or quantiser: python -m examples.training.quantise_demo."""
    expected = {bundled_key(*inputs(name)) for name in BUNDLED}
    assert {place.name for place in BUNDLED_WEIGHTS.iterdir()} == expected


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_weights_are_undamaged_and_near_the_float_weights(name: str) -> None:
    source, recipe, calibration = inputs(name)
    weights = NeutralWeights.open(BUNDLED_WEIGHTS / bundled_key(source, recipe, calibration), verify=True)
    assert weights.manifest.method == "gptq"
    with TensorFolder.open(source.weights) as floats:
        for module in weights.modules():
            expected = floats.floats(f"{module}.weight")
            error = np.square(weights.dequantised(module) - expected).sum() / np.square(expected).sum()
            assert error < 0.02, module


def test_bundled_weights_need_no_torch_unlike_another_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgekit.errors import TargetMissing
    from edgekit.quant import pipeline

    monkeypatch.setattr(pipeline, "find_spec", lambda name: None)
    source, recipe, calibration = inputs("demo")
    weights = neutral_weights(source, recipe, calibration=calibration)
    assert weights.folder.parent == BUNDLED_WEIGHTS
    with pytest.raises(TargetMissing, match="torch"):
        neutral_weights(source, find_recipe("s4-g64"), calibration=calibration)
