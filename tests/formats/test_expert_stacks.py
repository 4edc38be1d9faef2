"""Stacks of experts as gpt-oss's files hold them: floats and MXFP4, by transformers' own reading; and damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import family_models as models
import torch
from configs import GPT_OSS_20B, TINY, write_config
from mxfp4_stacks import MXFP4, Arrays, write_mxfp4
from safetensors.numpy import save_file
from shapes import spec_of

from edgekit.contracts.plan import source_notes
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import InvalidInput, Unsupported
from edgekit.model.source import open_source, open_tensors
from edgekit.quant import reference_decoder

pytestmark = pytest.mark.quantize

GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    folder, plain = tmp_path / "packed", tmp_path / "plain"
    _, floats = write_mxfp4(folder)
    models.write_model(plain, *models.EXPERTS["gpt_oss"])
    save_file(floats, plain / "model.safetensors", {"format": "pt"})
    source = open_source(folder)
    assert (source.spec.exportable, source.quantised_as) == (None, "MXFP4, F32")
    theirs = torch.nn.Module.eval(models.reference_of(plain, models.weights_of(plain, "float32", tmp_path / "store")))
    tokens = list(models.tokens_of(30))
    with open_tensors(folder) as stored:
        assert stored.floats(f"{GATE_UP[:-13]}.1.up_proj.weight", slice(3, 7)).shape == (4, 64)
        found = reference_decoder.logits(source.spec, lambda name: torch.from_numpy(stored.floats(name)), tokens)
    expected = models.logits_of(theirs, tokens)
    assert np.abs(found.numpy() - expected).max() / np.abs(expected).max() < 1e-5
    weights = models.weights_of(folder, "s4-g32", tmp_path / "store")
    assert weights.format_of(f"{GATE_UP[:-13]}.1.up_proj").kind == "s4"


def test_a_plan_of_a_config_knows_that_the_experts_are_mxfp4(tmp_path: Path) -> None:
    source = open_source(write_config(tmp_path, {**GPT_OSS_20B, "quantization_config": MXFP4}))
    assert source.spec.exportable is None
    assert (source.quantised_as, source.spec.parameters) == ("MXFP4, BF16", 20_914_757_184)


def test_values_are_rounded_twice_except_in_mxfp4() -> None:
    assert source_notes("MXFP4, BF16", named_recipe("s4-g32")) == (
        "the source is MXFP4, BF16, not float: with this recipe its values are rounded twice",
    )
    (kept,) = source_notes("MXFP4, BF16", named_recipe("mxfp4"))
    assert "mxfp4 keeps its MXFP4 values" in kept
    (twice,) = source_notes("Q4_K, F32", named_recipe("mxfp4"))
    assert "rounded twice" in twice
    (exact,) = source_notes("Q4_K, F32", named_recipe("float32"))
    assert "float32 keeps its values as they are" in exact


def test_other_mxfp4_is_refused() -> None:
    config = TINY["gpt_oss"] | {"quantization_config": {**MXFP4, "block_size": 16}}
    assert "block_size: 16 is unknown" in str(spec_of(config).exportable)
    other = TINY["qwen3_moe"] | {"quantization_config": MXFP4}
    assert "quant_method: 'mxfp4' is not supported" in str(spec_of(other).exportable)


def test_contradicting_configs_are_refused() -> None:
    for changes, named in (({"experts_per_token": 3}, "experts_per_token"), ({"initial_context_length": 7}, "initial")):
        with pytest.raises(InvalidInput, match=rf"{named}.* contradicts .*; keep the right one"):
            spec_of(GPT_OSS_20B | changes)
    with pytest.raises(Unsupported, match="swiglu_beta: 1 is not a known field of gpt_oss"):
        spec_of(GPT_OSS_20B | {"swiglu_beta": 1})


def reshaped(suffix: str, change: Callable[[Any], Any]) -> Callable[[Arrays], None]:
    def damage(tensors: Arrays) -> None:
        tensors[f"{GATE_UP}{suffix}"] = change(tensors[f"{GATE_UP}{suffix}"])

    return damage


def twice(tensors: Arrays) -> None:
    tensors[f"{GATE_UP[:-13]}.0.up_proj.weight"] = np.zeros((128, 64), np.float32)


DAMAGED: dict[str, tuple[Callable[[Arrays], None], str]] = {
    "narrow blocks": (reshaped("_blocks", lambda each: each[..., :8].copy()), "not MXFP4 blocks of 16 bytes"),
    "blocks of words": (reshaped("_blocks", lambda each: each.astype(np.int32)), "not MXFP4 blocks"),
    "fewer exponents": (reshaped("_scales", lambda each: each[:, :-1].copy()), "with exponents"),
    "no exponents": (lambda tensors: tensors.__delitem__(f"{GATE_UP}_scales"), "_scales' is missing"),
    "exponent that is no number": (reshaped("_scales", lambda each: each | 255), "holds an exponent that is no number"),
    "odd outputs": (reshaped("_bias", lambda each: each[:, :-1].copy()), "255 outputs of gate and up"),
    "a bias of integers": (reshaped("_bias", lambda each: each.astype(np.int32)), "not a stack of floats"),
    "too many experts": (reshaped("_bias", lambda each: np.zeros((1025, 2), np.float32)), "more than 1024"),
    "no experts": (reshaped("_bias", lambda each: each[:0].copy()), "holds no experts"),
    "fewer experts than stated": (reshaped("_bias", lambda each: each[:-1].copy()), "missing: .*experts.5.gate_proj"),
    "stored twice": (twice, "up_proj.weight' is stored twice"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_stacks_are_refused_in_one_line(tmp_path: Path, case: str) -> None:
    tensors, _ = write_mxfp4(tmp_path / "model")
    damage, reason = DAMAGED[case]
    damage(tensors)
    save_file(tensors, tmp_path / "model" / "model.safetensors")

    def read() -> None:
        open_source(tmp_path / "model", need_weights=True)
        models.weights_of(tmp_path / "model", "s4-g32", tmp_path / "store")

    with pytest.raises(InvalidInput, match=reason) as refused:
        read()
    assert "\n" not in str(refused.value)
