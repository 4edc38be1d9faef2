"""Smoothed inputs: the same model, less lost, and stopped runs that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


import family_models as models
import torch

from edgekit.common.content_store import ContentStore
from edgekit.common.progress import no_progress
from edgekit.contracts.neutral import CalibrationFact, NeutralWeights
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import UnknownName
from edgekit.formats.safetensors import TensorFolder
from edgekit.methods.quant import smoothing
from edgekit.model.spec import ModelSpec
from edgekit.quant import pipeline, reference_decoder as decoder
from edgekit.quant.calibration import Calibration
from edgekit.quant.pipeline import neutral_weights
from edgekit.quant.shards import ReadRows

pytestmark = pytest.mark.quantize


class StoppedError(Exception):
    pass


RECIPE = named_recipe("s4-g32-smooth")


LOUD = 5  # a channel whose inputs are far larger than the others


def calibration_of(count: int = 8, length: int = 32) -> Calibration:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(3, 160, (count, length), generator=generator).tolist()
    fact = CalibrationFact(sha256="0" * 64, description="noise", sequences=count, tokens=count * length)
    return Calibration(tuple(tuple(row) for row in rows), fact)


def opened(folder: Path, family: str) -> tuple[ModelSpec, ReadRows]:
    """A model with one loud channel before each layer's linears."""
    kind, config = models.EVERY[family]
    models.write_model(folder, kind, config)
    spec, stored = models.spec_of(folder), TensorFolder.open(folder)
    names = [name for name in (spec.layer_norms()[0], spec.layer_norms()[2]) if name]
    loud = {f"{spec.prefix}layers.{index}.{name}.weight" for index in range(len(spec.layers)) for name in names}

    def read(name: str, rows: slice | None = None) -> torch.Tensor:
        values = torch.from_numpy(stored.floats(name))
        if name in loud:
            values[LOUD] = 20.0
        return values if rows is None else values[rows]

    return spec, read


def smooth(spec: ModelSpec, read: ReadRows, exact: ReadRows | None = None) -> ReadRows:
    factors = smoothing.smoothing_factors(RECIPE, spec, calibration_of(), read, no_progress)
    doubled = {module: factor.double() for module, factor in factors.items()}
    return smoothing.smoothed(exact or read, doubled if exact else factors, RECIPE, spec)


def logits(spec: ModelSpec, read: ReadRows, observe: Any = decoder.ignore) -> torch.Tensor:
    return decoder.logits(spec, read, torch.tensor(calibration_of(2).sequences), get_rows=read, observe=observe)


@pytest.mark.parametrize(
    "family", ["llama", "llama untied, with biases", "qwen3", "phi3", "gemma2", "gemma3", "smollm3", "gemma4"]
)
def test_the_float_model_stays_the_same(tmp_path: Path, family: str) -> None:
    spec, read = opened(tmp_path, family)
    tensors = {tensor.name: read(tensor.name).double() for tensor in spec.tensors()}

    def exact(name: str, rows: slice | None = None) -> torch.Tensor:
        return tensors[name] if rows is None else tensors[name][rows]

    smoother = smooth(spec, read, exact)
    before, after = logits(spec, exact), logits(spec, smoother)
    assert (after - before).abs().max() < 1e-6 * before.abs().max()
    changed = [name for name in tensors if not torch.equal(smoother(name), tensors[name])]
    assert any(name.endswith("down_proj.weight") for name in changed)
    assert any("norm" in name for name in changed) or not spec.layer_norms()[0]
    for name in changed:
        assert torch.equal(smoother(name)[1:3], smoother(name, slice(1, 3)))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rounding_inputs_to_eight_bits_loses_less(tmp_path: Path, family: str) -> None:
    spec, read = opened(tmp_path, family)

    def round_inputs(name: str, values: torch.Tensor) -> None:
        scale = values.abs().amax(-1, keepdim=True) / 127
        values.copy_((values / scale).round() * scale)

    exact = logits(spec, read)
    plain, smoothed = (logits(spec, each, round_inputs) for each in (read, smooth(spec, read)))
    assert (smoothed - exact).square().mean() < 0.5 * (plain - exact).square().mean()


def test_inputs_that_experts_share_with_their_router_stay(tmp_path: Path) -> None:
    spec, read = opened(tmp_path, "mixtral")
    factors = smoothing.smoothing_factors(RECIPE, spec, calibration_of(), read, no_progress)
    assert not factors


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_neutral_weights_are_the_same_model(tmp_path: Path, method: Any) -> None:
    kind, config = models.EVERY["llama"]
    models.write_model(tmp_path / "model", kind, config)
    plain, smoothed = (made_of_smoothing(tmp_path, name, method) for name in ("s8", "s8-smooth"))
    assert any("SmoothQuant" in note for note in smoothed.manifest.notes)
    assert plain.sha256 != smoothed.sha256

    def of(weights: NeutralWeights) -> torch.Tensor:
        return logits(weights.model, lambda name, rows=None: torch.from_numpy(weights.tensor(name, rows)))

    assert (of(smoothed) - of(plain)).square().mean() < 0.01 * of(plain).square().mean()


def made_of_smoothing(folder: Path, recipe: str, method: Any, store: str = "store") -> NeutralWeights:
    return neutral_weights(
        folder / "model", named_recipe(recipe), method=method, calibration=calibration_of(),
        store=ContentStore(folder / store),
    )  # fmt: skip


def test_a_stopped_run_goes_on_with_the_factors_that_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, config = models.EVERY["llama"]
    models.write_model(tmp_path / "model", kind, config)
    expected = made_of_smoothing(tmp_path, "s4-g32-smooth", "gptq", "whole").sha256
    measure, times = smoothing.smoothing_factors, []

    def counted(*given: Any) -> Any:
        times.append(1)
        return measure(*given)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(smoothing, "smoothing_factors", counted)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_recipe_within_budget", stop)
        with pytest.raises(KeyboardInterrupt):
            made_of_smoothing(tmp_path, "s4-g32-smooth", "gptq")
    assert made_of_smoothing(tmp_path, "s4-g32-smooth", "gptq").sha256 == expected
    assert len(times) == 1


def test_float_recipes_have_no_smooth_variant() -> None:
    assert named_recipe("balanced-smooth").smooth and not named_recipe("balanced").smooth
    with pytest.raises(UnknownName):
        named_recipe("float16-smooth")
