"""Tuned scales: gradients beside autograd's, a smaller loss, the same integers, and runs that go on after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
import torch

from edgekit.common.content_store import ContentStore
from edgekit.contracts.neutral import CalibrationFact, NeutralWeights
from edgekit.contracts.recipe import named_recipe
from edgekit.formats.safetensors import TensorFolder
from edgekit.quant import reference_decoder as decoder
from edgekit.quant.calibration import Calibration
from edgekit.quant.pipeline import neutral_weights
from edgekit.quant.scale_tuning import PASSES, SEQUENCES_A_STEP, TUNED, ScaleTuning

pytestmark = pytest.mark.quantize


class StoppedError(Exception):
    pass


def text(count: int = 8, length: int = 24, vocabulary: int = 160) -> Calibration:
    """Tokens that follow each other by a rule."""
    rows = tuple(
        tuple(3 + (seed * 7 + step * step) % (vocabulary - 3) for step in range(length)) for seed in range(count)
    )
    fact = CalibrationFact(sha256="0" * 64, description="a rule", sequences=count, tokens=count * length)
    return Calibration(rows, fact)


def made(folder: Path, calibration: Calibration, recipe: str = "s4-g32", **options: Any) -> NeutralWeights:
    return neutral_weights(
        folder / "model",
        named_recipe(recipe),
        calibration=calibration,
        store=ContentStore(folder / options.pop("store", "store")),
        **options,
    )


def floats_of(folder: Path) -> Any:
    """Return a reader of the float model's rows."""
    spec, stored = models.spec_of(folder), TensorFolder.open(folder)
    tensors = {tensor.name: torch.from_numpy(stored.floats(tensor.name)) for tensor in spec.tensors()}
    return lambda name, rows=None: tensors[name] if rows is None else tensors[name][rows]


def tuned_modules(weights: NeutralWeights) -> list[str]:
    """Return the four-bit linears of the layers."""
    layers = f"{weights.model.prefix}layers."
    return [
        module
        for module in weights.modules()
        if module.startswith(layers)
        and weights.tensor_of(module).role == "linear"
        and weights.format_of(module).kind == "s4"
    ]


def divergence(weights: NeutralWeights, read: Any, ids: Any) -> float:
    """Return the mean KL of the stored weights' predictions from the float model's."""
    spec = weights.model
    exact = decoder.logits(spec, read, ids).log_softmax(-1)
    own = decoder.logits(spec, lambda name: torch.from_numpy(weights.tensor(name)), ids).log_softmax(-1)
    return float((exact.exp() * (exact - own)).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "gemma4", "mixtral"])
def test_gradients_are_those_of_autograd(tmp_path: Path, family: str) -> None:
    models.write_model(tmp_path / "model", *models.EVERY[family])
    calibration = text(count=2)
    base, read = made(tmp_path, calibration), floats_of(tmp_path / "model")
    spec, ids = base.model, torch.tensor(calibration.sequences)
    modules = tuned_modules(base)
    factors = {m: torch.zeros(base.scales(m).shape, requires_grad=True) for m in modules}

    def stored(name: str, rows: slice | None = None) -> Any:
        module = name.removesuffix(".weight")
        values = torch.from_numpy(base.tensor(name))
        if module in factors:
            grouped = values.view(*factors[module].shape, -1)
            values = (grouped * factors[module].exp()[:, :, None]).view(values.shape)
        return values if rows is None else values[rows]

    def last_hidden(get: Any) -> Any:
        hidden = decoder.embed(spec, get(f"{spec.prefix}embed_tokens.weight")[ids])
        side_inputs = decoder.layer_inputs(spec, ids, hidden, get)
        for index in range(len(spec.layers)):
            tensors = decoder.layer_tensors(spec, index, get)
            hidden = decoder.layer_forward(spec, index, tensors, hidden, side_inputs=side_inputs)
        return hidden

    def predictions(get: Any, hidden: Any) -> Any:
        matrix = f"{spec.prefix}embed_tokens.weight" if spec.tied else f"{spec.head}.weight"
        return decoder.head(spec, get(decoder.last_norm(spec)), get(matrix), hidden).log_softmax(-1)

    with torch.no_grad():
        target = last_hidden(read)
        exact = predictions(read, target)
    own = predictions(stored, last_hidden(stored))
    loss = (exact.exp() * (exact - own)).sum()
    loss.backward()  # type: ignore[no-untyped-call]

    tuning = ScaleTuning(base, read, calibration, tmp_path)
    gradient, found = tuning.gradient(ids, target, lambda what: None)
    assert found == pytest.approx(float(loss.detach()), rel=1e-3, abs=1e-4)
    for module in modules:
        expected = factors[module].grad
        assert expected is not None
        error = (tuning.of_module(gradient, module) - expected).norm() / expected.norm()
        assert error < 5e-3, module


def test_scales_change_and_integers_do_not(tmp_path: Path) -> None:
    models.write_model(tmp_path / "model", *models.FAMILIES["llama"])
    calibration = text()
    before, read = made(tmp_path, calibration, "balanced"), floats_of(tmp_path / "model")
    after = made(tmp_path, calibration.with_tuning(), "balanced")
    for module in before.modules():
        if not before.format_of(module).is_float:
            assert np.array_equal(before.integers(module), after.integers(module))
    changed = {
        module
        for module in before.modules()
        if not before.format_of(module).is_float and not np.array_equal(before.scales(module), after.scales(module))
    }
    assert changed == set(tuned_modules(before))
    ids = torch.tensor(calibration.sequences)
    assert divergence(after, read, ids) < divergence(before, read, ids)
    assert after.manifest.calibration is not None
    assert after.manifest.calibration.description == "a rule, scales tuned on it"
    assert TUNED in after.manifest.notes and TUNED not in before.manifest.notes
    assert after.recipe == before.recipe


def test_a_stopped_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    models.write_model(tmp_path / "model", *models.FAMILIES["llama"])
    calibration = text().with_tuning()
    expected = made(tmp_path, calibration, store="whole")
    steps = PASSES * (8 // SEQUENCES_A_STEP)
    for stop_at in (1, 3, steps, steps + 2):
        told: list[str] = []

        def stop(done: float, total: float, what: str, stop_at: int = stop_at, told: list[str] = told) -> None:
            if what.startswith("tuning scales: layer 1, backward") or (told and what.startswith("neutral weights")):
                told.append(what)
            if len(told) == stop_at:
                raise StoppedError

        with pytest.raises(StoppedError):
            made(tmp_path, calibration, store=f"stopped-{stop_at}", progress=stop)
        found = made(tmp_path, calibration, store=f"stopped-{stop_at}")
        assert (found.folder / "edgekit.json").read_bytes() == (expected.folder / "edgekit.json").read_bytes()
        assert found.sha256 == expected.sha256


def test_integers_of_the_normal_effort_are_taken_from_the_store(tmp_path: Path) -> None:
    models.write_model(tmp_path / "model", *models.FAMILIES["llama"])
    made(tmp_path, text())
    told: list[str] = []
    made(tmp_path, text().with_tuning(), progress=lambda done, total, what: told.append(what))
    assert sum(what.startswith("neutral weights: embedding") for what in told) == 1  # the copy, and no other
    again: list[str] = []
    made(tmp_path, text().with_tuning(), progress=lambda done, total, what: again.append(what))
    assert not again
