"""Frequencies of every kind of rope equal those of transformers, and change with the planned context where due."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from configs import PHI_4_MINI, PUBLISHED, SMALL, TINY, Config
from hypothesis import given, settings, strategies as st
from shapes import spec_of

from edgekit.model.parts import Rope
from edgekit.model.rope import frequencies

LLAMA: Config = SMALL | {"model_type": "llama", "head_dim": 64, "max_position_embeddings": 4096, "rope_theta": 5e5}


def _scaled(**scaling: Any) -> Config:
    return LLAMA | {"rope_scaling": scaling}


CONFIGS: dict[str, Config] = {
    "default": LLAMA,
    "a theta of millions": LLAMA | {"rope_theta": 5e6},
    "linear": _scaled(rope_type="linear", factor=4.0),
    "dynamic": _scaled(rope_type="dynamic", factor=2.0),
    "llama3": _scaled(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=1024),
    "yarn": _scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024),
    "yarn, trained length not written": _scaled(rope_type="yarn", factor=4.0),
    "yarn, own ramp": _scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024, beta_fast=16.0,
                              beta_slow=2.0),
    "yarn, ramp not rounded": _scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024,
                                      truncate=False),
    "yarn, own attention": _scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024,
                                   attention_factor=1.25),
    "yarn, two scales": _scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024, mscale=0.7,
                                mscale_all_dim=1.1),
    "longrope": PHI_4_MINI,
    "longrope, own attention": PHI_4_MINI | {"rope_scaling": PHI_4_MINI["rope_scaling"] | {"attention_factor": 1.3}},
    "partly turned": TINY["phi3"] | {"partial_rotary_factor": 0.5},
    "llama 3.2": PUBLISHED["Llama-3.2-1B"],
    "qwen 3": PUBLISHED["Qwen3-8B"],
    "smollm3": PUBLISHED["SmolLM3-3B"],
    "gemma 2": PUBLISHED["Gemma-2-2B"],
}  # fmt: skip
BY_KIND: dict[str, Config] = {
    "gemma 3": PUBLISHED["Gemma-3-1B"],
    "gemma 3, scaled": PUBLISHED["Gemma-3-1B"] | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma 3n": PUBLISHED["Gemma-3n-E2B"],
    "gemma 4": PUBLISHED["Gemma-4-small"],
}


def _equal(rope: Rope, context: int, expected: Any, scale: float) -> None:
    found, attention = frequencies(rope, context)
    assert found == pytest.approx(expected.tolist(), rel=1e-6)
    assert attention == pytest.approx(scale, rel=1e-6)


@pytest.mark.quantize
@pytest.mark.parametrize("context", [16, 4096, 4097, 131072])
@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_those_of_transformers(name: str, context: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    rope = spec_of(CONFIGS[name]).ropes["default"]
    config = transformers.AutoConfig.for_model(**copy.deepcopy(CONFIGS[name]))
    default = Phi3RotaryEmbedding.compute_default_rope_parameters
    expected, scale = ROPE_INIT_FUNCTIONS.get(rope.kind, default)(config, device="cpu", seq_len=context)
    _equal(rope, context, expected, scale)


@pytest.mark.quantize
@pytest.mark.parametrize("name", BY_KIND)
def test_each_kind_of_layer_has_its_own_frequencies(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    config = transformers.AutoConfig.for_model(**copy.deepcopy(BY_KIND[name]))
    module = (Gemma4TextRotaryEmbedding if name == "gemma 4" else Gemma3RotaryEmbedding)(config)
    for kind, rope in spec_of(BY_KIND[name]).ropes.items():
        expected = getattr(module, f"{kind}_attention_inv_freq")
        _equal(rope, 4096, expected, getattr(module, f"{kind}_attention_attention_scaling"))


def test_a_longrope_takes_its_long_factors_beyond_the_trained_positions() -> None:
    rope = spec_of(PHI_4_MINI).ropes["default"]
    short, long = frequencies(rope, 4096)[0], frequencies(rope, 4097)[0]
    assert [slow / fast for slow, fast in zip(short, long, strict=True)] == pytest.approx(rope.long_factor)


def test_a_dynamic_rope_stretches_only_beyond_the_trained_positions() -> None:
    rope = spec_of(CONFIGS["dynamic"]).ropes["default"]
    assert frequencies(rope, 100) == frequencies(rope, 4096)
    assert frequencies(rope, 8192)[0][-1] < frequencies(rope, 4096)[0][-1]


@settings(deadline=None, max_examples=100)
@given(
    theta=st.floats(1.1, 1e12),
    half=st.integers(2, 128),
    factor=st.floats(1.0, 1e3),
    context=st.integers(1, 1 << 28),
    kind=st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "proportional"]),
)
def test_frequencies_are_finite_one_per_rotated_pair(
    theta: float, half: int, factor: float, context: int, kind: Any
) -> None:
    rope = Rope(theta=theta, dim=2 * half, kind=kind, factor=factor, original_positions=4096,
                low_freq_factor=1.0, high_freq_factor=4.0, proportion=0.5)  # fmt: skip
    found, attention = frequencies(rope, context)
    assert len(found) == half
    assert all(math.isfinite(value) and 0 <= value <= 1 for value in found)
    assert found == sorted(found, reverse=True)
    assert attention >= 1
