"""An EAGLE-3 head's draft logits are those of a plain torch reading, in either layout and however tokens are fed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")

from eagle3_heads import LEGACY, SPECULATORS, torch_logits, write_head
from sealed_heads import check_logits

from edgekit.methods.drafters.head_decoder import HeadDecoder
from edgekit.model.families import model_from_config
from edgekit.model.heads import read_head

pytestmark = pytest.mark.quantize

TARGET = model_from_config(
    {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 60,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "max_position_embeddings": 512, "rope_theta": 10000.0,
    },
    "target", "target",
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a small vocabulary": {"draft_vocabulary": 33},
    "norms of the residual": {"config": {"norm_before_residual": True}},
    "one norm before fc": {"config": {"norm_before_fc": True, "norm_output": True}},
    "a norm for each layer": {"config": {"fc_norm": True}, "draft_vocabulary": 50},
    "qwen3": {"kind": "qwen3"},
}


@pytest.mark.parametrize("layout", [LEGACY, SPECULATORS])
@pytest.mark.parametrize("variant", VARIANTS)
def test_draft_logits_equal_a_plain_torch_reading(tmp_path: Path, variant: str, layout: str) -> None:
    folder = write_head(tmp_path / "head", TARGET, layout, **VARIANTS[variant])
    draw = np.random.default_rng(1)
    tokens, drafted = draw.integers(0, 60, 90).tolist(), draw.integers(0, 60, 4).tolist()
    hidden = draw.standard_normal((89, 96)).astype(np.float32)
    expected = torch_logits(folder, hidden, tokens, drafted)
    head = read_head(folder, TARGET)
    model = HeadDecoder(head)
    check_logits(model, hidden, tokens, drafted, expected)
    assert np.isneginf(np.delete(expected, model.targets, axis=1)).all()
    model.close()


def test_a_full_cache_forgets_the_oldest_tokens(tmp_path: Path) -> None:
    model = HeadDecoder(read_head(write_head(tmp_path / "head", TARGET), TARGET))
    draw = np.random.default_rng(2)
    tokens, inputs = draw.integers(0, 60, 50), draw.standard_normal((50, 32)).astype(np.float32)
    small, newest = model.start(20), model.start(100)
    for at in range(50):
        one = slice(at, at + 1)
        out = model.forward(small, tokens[one], inputs[one], np.array([at]))
        assert small.length <= 20 and np.isfinite(out).all()
    kept = small.length
    last = slice(50 - kept, 50)
    again = model.forward(newest, tokens[last], inputs[last], np.arange(50 - kept, 50))
    np.testing.assert_allclose(small.keys[:, :kept], newest.keys[:, :kept], atol=1e-5)
    np.testing.assert_allclose(out[-1], again[-1], atol=1e-4)
    assert model.start(7).capacity == 7
    wide = model.start(7)
    assert model.forward(wide, tokens, inputs, np.arange(50)).shape == (50, 32) and wide.length <= 7
