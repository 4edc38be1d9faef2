"""The decoder that is lowered equals the reference for every family and every way to cut the text."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("executorch")
pytest.importorskip("transformers")

import family_models as models
import torch
from edgekit_executorch.attention import Places
from edgekit_executorch.decoder import Append, ExecutorchDecoder, StepForward
from edgekit_executorch.layer_tensors import has_windows
from edgekit_executorch.linears import QuantisedLinear, embedding, linear, round_tokens
from edgekit_executorch.operators import register_for_tracing
from engines import apart, weights_of
from executorch_models import SLOTS, reference_logits

from edgekit.contracts.recipe import Format, Recipe, Rule
from edgekit.errors import Unsupported

pytestmark = [pytest.mark.executorch, pytest.mark.quantize]

TOKENS = list(models.tokens_of(40))
UNSEEN = -1e30


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    register_for_tracing()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own, about operators that describe themselves in an old way
        yield


def said(decoder: ExecutorchDecoder, tokens: list[int]) -> np.ndarray:
    """Logits of every token: half as one prefill, then a chunk, then one by one."""
    forward, found, start = Append(decoder), [], 0
    half, chunk = len(tokens) // 2, len(tokens) // 5
    for size in [half, chunk, *[1] * (len(tokens) - half - chunk)]:
        piece = torch.tensor([tokens[start : start + size]])
        found.append(forward(piece, torch.tensor([start]), torch.arange(size)).numpy())
        start += size
    return np.concatenate(found)


@pytest.mark.parametrize("style", ["fused", "scattered"])
@pytest.mark.parametrize("family", list(models.FAMILIES))
def test_every_family_equals_reference(family: str, style: str) -> None:
    _, weights = weights_of("executorch", family)
    made = ExecutorchDecoder(weights, slots=SLOTS, context=SLOTS, style=style, arithmetic="floats")
    assert apart(said(made, TOKENS), reference_logits(weights, TOKENS)) < 2e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral with a window"])
def test_step_with_default_positions_equals_forward(tmp_path: Path, family: str) -> None:
    _, weights = weights_of("executorch", family, "float32")
    made = ExecutorchDecoder(weights, slots=SLOTS, context=SLOTS)
    expected = said(made, TOKENS)
    places = torch.arange(len(TOKENS))
    distance = places[:, None] - torch.arange(SLOTS)[None]
    masks = [(distance < 0).float() * UNSEEN]
    if has_windows(weights.model, SLOTS):
        masks.append(((distance < 0) | (distance >= 12)).float() * UNSEEN)
    found = StepForward(made)(torch.tensor([TOKENS]), places, places, places, *masks).numpy()
    assert apart(found, expected) < 1e-5


def test_a_linear_holds_the_neutral_integers() -> None:
    _, weights = weights_of("executorch", "phi3")
    module = "model.layers.1.self_attn.qkv_proj"
    made = linear(weights, module, slice(64, 96))
    assert isinstance(made, QuantisedLinear)
    np.testing.assert_array_equal(made.weight.numpy(), weights.integers(module)[64:96])
    np.testing.assert_array_equal(made.dequantised().numpy(), weights.dequantised(module)[64:96])


def test_each_token_is_rounded_alone() -> None:
    values = torch.randn(5, 64) * torch.tensor([0.01, 1, 100, 1, 1])[:, None]
    rounded = round_tokens(values)
    step = (values.amax(1).clamp(min=0) - values.amin(1).clamp(max=0)) / 255
    assert ((rounded - values).abs().amax(1) <= step * 0.51).all()
    assert torch.equal(round_tokens(values[2:3]), rounded[2:3])


def test_4_bit_table_is_refused() -> None:
    recipe = Recipe(name="s4-throughout", rules=(Rule(pattern="*", format=Format(kind="s4", group=32)),))
    _, weights = weights_of("executorch", "llama", recipe)
    with pytest.raises(Unsupported, match="8-bit or float"):
        embedding(weights, "model.embed_tokens")


def test_layers_with_equal_windows_share_a_mask() -> None:
    """Masks of each layer's own took 491 MiB in Gemma 3's program for 8,192 tokens."""
    places = Places.following(torch.tensor([3]), 4)
    mask = places.mask_of(16, 5)
    assert places.mask_of(16, 5) is mask and places.mask_of(16, None) is not mask
    shown = mask[2] == 0  # of the token at position 5
    assert shown.tolist() == [1 <= slot <= 5 for slot in range(16)]
