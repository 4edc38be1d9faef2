"""Engines are timed once for each size of model on this machine, and the fastest is planned."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import shapes

from edgekit.contracts.plan import Plan
from edgekit.device import engine_speeds as speeds
from edgekit.device.engine_speeds import SIZE_CLASSES, EngineSpeed, class_of, random_model
from edgekit.errors import InvalidInput
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest

BOTH = ("llamacpp", "onnx")
# Not importorskip: a process that imported xllamacpp cannot open the llamacpp target.
needs_both = pytest.mark.skipif(
    any(find_spec(package) is None for package in ("xllamacpp", "onnxruntime")), reason="two engines are compared"
)


@pytest.fixture(autouse=True)
def timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGEKIT_ENGINES", "measured")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def timed(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[str]:
    """Replace measurements by these step times; return the list of measured size classes."""
    measured: list[str] = []

    def measure(size: speeds.SizeClass, targets: object, threads: int) -> dict[str, EngineSpeed]:
        measured.append(size.name)
        return {name: EngineSpeed(10 * step, step) for name, step in seconds.items()}

    monkeypatch.setattr(speeds, "_measure", measure)
    return measured


def test_every_model_has_a_size_class_with_a_small_random_model() -> None:
    for name, size in (("QWEN_25_05B", "half-billion"), ("LLAMA_32_1B", "billion"), ("LLAMA_2_70B", "billion")):
        if hasattr(shapes, name):
            assert class_of(shapes.spec_of(getattr(shapes, name), name)).name == size
    for size_class in SIZE_CLASSES:
        assert random_model(size_class).parameters < 0.2e9


def test_engines_are_timed_once_until_versions_change(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, told = timed(monkeypatch, onnx=0.002, llamacpp=0.001), []
    model = random_model(SIZE_CLASSES[0])
    first = speeds.engine_speeds(model, BOTH, threads=2, announce=told.append)
    assert speeds.engine_speeds(model, BOTH, threads=2, announce=told.append) == first
    assert measured == ["small"] and len(told) == 1 and "timing llamacpp and onnx" in told[0]
    monkeypatch.setattr(speeds, "versions_of", lambda names: {"onnxruntime": "99"})
    speeds.engine_speeds(model, BOTH, threads=2, announce=told.append)
    assert measured == ["small", "small"]


def test_a_busy_machine_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, told = timed(monkeypatch, onnx=0.002, llamacpp=0.001), []
    monkeypatch.setattr(os, "getloadavg", lambda: (500.0, 1.0, 1.0))
    assert not speeds.engine_speeds(random_model(SIZE_CLASSES[0]), BOTH, threads=2, announce=told.append)
    assert not measured and "too busy" in told[0]


def test_damaged_times_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = timed(monkeypatch, onnx=0.002, llamacpp=0.001)
    model = random_model(SIZE_CLASSES[0])
    speeds.engine_speeds(model, BOTH, threads=2)
    (path,) = Path(os.environ["EDGEKIT_HOME"]).rglob("engines-small.json")
    for damage in ({"onnx": [0.1]}, {"onnx": ["x", "y"]}, {"onnx": [-1, 1]}, []):
        path.write_text(json.dumps({**json.loads(path.read_text()), "speeds": damage}))
        assert speeds.engine_speeds(model, BOTH, threads=2)["onnx"].step_s == 0.002
    assert len(measured) == 5


def test_edgekit_engines_setting_disables_timing_and_is_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = timed(monkeypatch, onnx=0.002, llamacpp=0.001)
    monkeypatch.setenv("EDGEKIT_ENGINES", "profile")
    assert not speeds.engine_speeds(random_model(SIZE_CLASSES[0]), BOTH, threads=2) and not measured
    monkeypatch.setenv("EDGEKIT_ENGINES", "sometimes")
    with pytest.raises(InvalidInput, match="EDGEKIT_ENGINES='sometimes': set it to measured or profile"):
        speeds.measures()


def planned(**request: object) -> Plan:
    return make_plans("demo", ["this"], PlanRequest(recipe="s4-g32", context=512, **request))[0]  # type: ignore[arg-type]


@needs_both
def test_the_faster_engine_is_planned_and_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, onnx=0.002, llamacpp=0.001)
    fast = planned()
    assert fast.target == "llamacpp"
    assert any("chosen by its speed on this machine" in note for note in fast.notes)
    assert any("llamacpp cpu is faster on this machine" in (each.reason or "") for each in fast.rejected)


@needs_both
def test_requested_options_win_over_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, onnx=0.002, llamacpp=0.001)
    assert planned(exits=(2,)).target == "onnx"
    assert planned(target="onnx").target == "onnx"


@needs_both
def test_speed_of_the_plan_follows_the_measured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, onnx=0.004, llamacpp=0.001)
    quick = planned().speed.decode_tokens_per_s
    (path,) = Path(os.environ["EDGEKIT_HOME"]).rglob("engines-small.json")
    path.unlink()
    timed(monkeypatch, onnx=0.004, llamacpp=0.002)
    assert planned().speed.decode_tokens_per_s == pytest.approx(quick / 2, rel=0.1)


def test_a_target_that_fails_is_left_out() -> None:
    process = speeds._started("onnx", Path("/nowhere"), Path("/nowhere/out"), 1)
    assert speeds._round("onnx", process) is None
    process.close()


@needs_both
@pytest.mark.slow
def test_real_engines_are_timed() -> None:
    found = speeds.engine_speeds(random_model(SIZE_CLASSES[0]), BOTH, threads=1)
    assert set(found) == set(BOTH) and all(0 < speed.step_s < speed.prompt_s for speed in found.values())
