"""EAGLE-3 heads in both published layouts: reading and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle3_heads import LEGACY, SPECULATORS, write_head

from edgekit.errors import EdgekitError, InvalidInput, Unsupported
from edgekit.model.eagle3 import default_layers
from edgekit.model.families import model_from_config
from edgekit.model.heads import read_head
from edgekit.model.spec import ModelSpec


def target(layers: int = 3, vocabulary: int = 40, hidden: int = 32) -> ModelSpec:
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocabulary, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "max_position_embeddings": 512, "rope_theta": 10000.0,
    }  # fmt: skip
    return model_from_config(config, "target", "target")


@pytest.mark.parametrize("layout", [LEGACY, SPECULATORS])
def test_both_layouts_are_read_the_same(tmp_path: Path, layout: str) -> None:
    folder = write_head(tmp_path / "head", target(), layout, draft_vocabulary=24, embedding=False)
    head = read_head(folder, target())
    assert head.spec.hidden_layers == (1, 2, 2) and head.spec.width == 96 and not head.spec.own_embedding
    assert len(head.targets) == 24 and head.spec.draft_vocab_size == 24
    shapes = dict(head.spec.tensors())
    assert shapes["layers.0.self_attn.q_proj.weight"] == (32, 64) and head.floats("fc.weight").shape == (32, 96)
    head.close()


def test_omitted_speculators_sizes_are_the_class_defaults(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", target(vocabulary=32000), SPECULATORS, vocab_size=None, draft_vocabulary=9)
    config = (folder / "config.json").read_text().replace('"vocab_size": null, ', "")
    (folder / "config.json").write_text(config)
    assert read_head(folder, target(vocabulary=32000)).spec.layer.vocab_size == 32000


def test_a_head_without_layers_reads_the_usual_ones(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", target(), LEGACY, config={"eagle_config": None})
    assert read_head(folder, target(layers=16)).spec.hidden_layers == (2, 8, 13) == default_layers(16)
    with pytest.raises(InvalidInput, match="the usual ones do not exist in so small a model"):
        read_head(folder, target(layers=3))


NAN = np.full((32, 96), np.nan, np.float32)
REFUSED: dict[str, tuple[type[EdgekitError], str, dict[str, Any]]] = {
    "another width": (InvalidInput, "hidden states of 32 values", {"target": {"hidden": 64}}),
    "another vocabulary": (InvalidInput, "with 40 tokens, and target has 48", {"target": {"vocabulary": 48}}),
    "a layer that is not there": (InvalidInput, "layers 1 to 1 of target", {"target": {"layers": 1}}),
    "another kind": (Unsupported, "is not a drafting head", {"config": {"architectures": ["LlamaForCausalLM"]}}),
    "dflash": (Unsupported, "speculators_model_type 'dflash'", {"config": {"speculators_model_type": "dflash"}}),
    "more layers": (Unsupported, "a head of 2 layers", {"num_hidden_layers": 2}),
    "another family": (Unsupported, "model_type 'gpt2'", {"kind": "gpt2"}),
    "another activation": (Unsupported, "silu is supported", {"hidden_act": "gelu"}),
    "a flag that is none": (InvalidInput, "true or false", {"config": {"norm_output": "yes"}}),
    "a missing tensor": (InvalidInput, "'fc.weight' is missing", {"tensors": {"fc.weight": None}}),
    "a wrong shape": (InvalidInput, "not \\[32, 96\\]", {"tensors": {"fc.weight": NAN[:, :64]}}),
    "not a number": (InvalidInput, "infinite values or none", {"tensors": {"fc.weight": NAN}}),
    "an unknown tensor": (Unsupported, "not part of a supported", {"tensors": {"fc.bias": NAN[:, 0]}}),
    "no map": (InvalidInput, "no d2t", {"draft_vocabulary": 24, "tensors": {"d2t": None}}),
    "a map to nowhere": (
        InvalidInput, "outside the vocabulary",
        {"draft_vocabulary": 24, "tensors": {"d2t": np.full(24, 2**62, np.int64)}},
    ),
    "a map to one token": (
        InvalidInput, "one token twice", {"draft_vocabulary": 24, "tensors": {"d2t": -np.arange(24, dtype=np.int64)}},
    ),
    "maps that differ": (
        InvalidInput, "different tokens", {"draft_vocabulary": 24, "tensors": {"t2d": np.arange(40) < 23}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    error, words, changed = REFUSED[name]
    sizes = changed.pop("target", {}) if "target" in changed else {}
    folder = write_head(tmp_path / "head", target(), **{k: v for k, v in changed.items() if k != "target"})
    with pytest.raises(error, match=words) as raised:
        read_head(folder, target(**sizes))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_a_cut_file_and_a_pickle_are_refused(tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", target())
    whole = (folder / "model.safetensors").read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(InvalidInput):
            read_head(folder, target())
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(Unsupported, match="pickled weights"):
        read_head(folder, target())
