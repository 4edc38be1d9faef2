"""The reference decoder equals transformers for every exported family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import family_models as models
import torch
import transformers

from edgekit.formats.safetensors import TensorFolder
from edgekit.model.source import open_tensors
from edgekit.quant import reference_decoder as decoder

pytestmark = pytest.mark.quantize


@pytest.mark.parametrize("family", models.EVERY)
def test_reference_decoder_equals_transformers(tmp_path: Path, family: str) -> None:
    kind, config = models.EVERY[family]
    models.write_model(tmp_path, kind, config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    spec, stored = models.spec_of(tmp_path), open_tensors(tmp_path)
    tokens = list(models.tokens_of(40))
    expected = models.logits_of(theirs, tokens)
    found = decoder.logits(spec, lambda name: torch.from_numpy(stored.floats(name)), tokens).numpy()
    assert np.abs(found - expected).max() / np.abs(expected).max() < 1e-5


def test_batched_texts_equal_single_texts(tmp_path: Path) -> None:
    kind, config = models.FAMILIES["gemma3"]
    models.write_model(tmp_path, kind, config)
    spec, stored = models.spec_of(tmp_path), TensorFolder.open(tmp_path)

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(stored.floats(name))

    texts = torch.tensor([models.tokens_of(24, seed=1), models.tokens_of(24, seed=2)])
    both = decoder.logits(spec, tensor, texts)
    for row, text in zip(both, texts, strict=True):
        torch.testing.assert_close(row, decoder.logits(spec, tensor, text), rtol=1e-5, atol=1e-5)


def test_every_input_of_every_linear_is_observed_once(tmp_path: Path) -> None:
    for family in ("llama", "phi3"):
        kind, config = models.EVERY[family]
        models.write_model(tmp_path / family, kind, config)
        spec, stored = models.spec_of(tmp_path / family), TensorFolder.open(tmp_path / family)
        seen: dict[str, tuple[int, ...]] = {}

        def observe(name: str, inputs: torch.Tensor, seen: dict[str, tuple[int, ...]] = seen) -> None:
            assert name not in seen
            seen[name] = tuple(inputs.shape)

        tensors = decoder.layer_tensors(
            spec,
            1,
            lambda name, stored=stored: torch.from_numpy(stored.floats(name)),  # type: ignore[misc]
        )
        decoder.layer_forward(spec, 1, tensors, torch.randn(2, 5, spec.hidden_size), observe)
        linears = {name.removesuffix(".weight") for name, value in tensors.items() if value.ndim == 2}
        assert set(seen) == linears
        for name, shape in seen.items():
            assert shape == (2, 5, tensors[f"{name}.weight"].shape[1])
