"""What docs/speculation.md shows was measured, and its picture is drawn from the stored figures."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from edgekit.cache import CachePolicy, Storage
from edgekit.runtime.drafting import Drafting, Playback
from edgekit.runtime.runtime import Runtime
from edgekit.runtime.text import read_codec

ROOT = Path(__file__).parents[1]
FIGURES: dict[str, Any] = json.loads((ROOT / "docs/data/speculation.json").read_text())


def picture() -> Any:
    return example("speculation_picture")


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
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


def test_the_page_shows_the_stored_figures() -> None:
    written = example("speculation_page")
    text = (ROOT / "docs/speculation.md").read_text()
    assert text == written.page(text, FIGURES), "run: python examples/speculation_page.py"
    shown = set(re.findall(r"<!-- (\w+) -->\n[^<]", text)) - {"end"}
    assert shown == set(written.WRITERS) == set(FIGURES)


@pytest.mark.parametrize("engine", ["onnx", "mlx", "executorch"])
def test_in_exact_mode_every_drafter_left_every_text_alone(engine: str) -> None:
    found = FIGURES["equal"]["by_engine"][engine]
    noise = found["noise"]
    for drafter in ("ngram", "early-exit", "draft model", "auto"):
        mode = "any" if f"{drafter}, greedy, any" in found else "exact"
        greedy = found[f"{drafter}, greedy, {mode}"]
        sampled = found[f"{drafter}, temperature 0.7, {mode}"]
        assert greedy["equal"] == greedy["of"] >= 500 and greedy["proposed"] > 1000
        assert sampled["equal"] == sampled["of"] > 0
    assert all(margin < noise for each in found.values() if isinstance(each, dict) for margin in each["margins"])


def test_lookups_and_host_time_are_within_what_was_promised() -> None:
    assert all(each["lookup_us"] < 5 for each in FIGURES["lookup"]["by_length"].values())
    assert all(each["median_us"] < 150 for each in FIGURES["host"]["by_drafter"].values())


def test_the_engine_that_takes_no_time_serves_the_loop() -> None:
    figures = example("speculation_figures")
    storage = Storage(capacity_tokens=128, kv_bits=16)
    drafting = Drafting(lambda prompt: Playback([7] * 200), 4)
    codec = read_codec(ROOT / "edgekit/_demo/target")
    with Runtime(figures.Nothing(), codec, storage=storage, policy=CachePolicy(), drafting=drafting) as runtime:
        assert runtime.complete([1] * 3, max_tokens=50).tokens == (7,) * 50
        assert runtime.metrics().steps < 15


def test_figures_say_how_loaded_the_machine_was() -> None:
    assert all(len(part["load"]) == 2 for part in FIGURES.values())
