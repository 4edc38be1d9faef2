"""What docs/speculation.md shows was measured, and its picture is drawn from the stored figures."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FIGURES: dict[str, Any] = json.loads((ROOT / "docs/data/speculation.json").read_text())


def picture() -> Any:
    spec = importlib.util.spec_from_file_location("speculation_picture", ROOT / "examples/speculation_picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_the_one_that_the_stored_figures_give() -> None:
    drawn = picture()
    assert (ROOT / "docs/speculation.svg").read_text() == drawn.picture(drawn.with_points(FIGURES))


@pytest.mark.parametrize(("rate", "slope", "draft"), [(0.8, 0.1, 0.05), (0.3, 0.5, 0.0), (1.0, 0.0, 0.0)])
def test_the_picture_follows_the_model(rate: float, slope: float, draft: float) -> None:
    found = picture().best(rate, slope, draft)
    each = [sum(rate**i for i in range(g + 1)) / (1 + (slope + draft) * g) for g in range(1, 16)]
    assert math.isclose(found, max(each))


def test_figures_say_how_loaded_the_machine_was() -> None:
    assert {"lookup", "host", "sweep", "pair", "edits", "laws", "equal"} <= set(FIGURES)
    assert all(len(part["load"]) == 2 for part in FIGURES.values())
