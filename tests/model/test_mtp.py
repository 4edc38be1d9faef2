"""The MTP part of a Qwen3.5 checkpoint: reading and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mtp_heads import part_alone, rewrite, write_mtp_model

from edgekit.errors import EdgekitError, InvalidInput, Unsupported
from edgekit.formats.safetensors import TensorFolder
from edgekit.model import mtp
from edgekit.model.heads import read_head
from edgekit.model.source import open_source


def test_a_checkpoint_and_its_part_alone_are_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp, "DRAFT_TOKENS", 270)
    model = write_mtp_model(tmp_path / "model")
    target = open_source(model).spec
    alone = part_alone(model, tmp_path / "alone")
    for folder in (model, alone):
        head = read_head(folder, target)
        assert (head.spec.kind, head.spec.hidden_layers, head.spec.draft_vocab_size) == ("mtp", (4,), 270)
        assert head.spec.width == 64 and not head.spec.own_embedding and head.targets is None
        assert dict(head.spec.tensors())["layers.0.self_attn.q_proj.weight"] == (512, 64)
        assert head.floats("fc.weight").shape == (64, 128)
        head.close()


def test_the_part_of_a_multimodal_checkpoint_is_read(tmp_path: Path) -> None:
    model = write_mtp_model(tmp_path / "model")
    alone = part_alone(model, tmp_path / "alone")
    text = json.loads((model / "config.json").read_text())
    wrapped = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    (alone / "config.json").write_text(json.dumps(wrapped))
    target = open_source(model).spec
    assert read_head(alone, target).spec.layer.layers == read_head(model, target).spec.layer.layers


WIDE = np.zeros((64, 192), np.float32)
REFUSED: dict[str, tuple[type[EdgekitError], str, dict[str, Any]]] = {
    "two layers": (Unsupported, "an MTP part of 2 layers", {"mtp_num_hidden_layers": 2}),
    "no layer": (Unsupported, "an MTP part of 0 layers", {"mtp_num_hidden_layers": 0}),
    "its own embedding": (Unsupported, "mtp_use_dedicated_embeddings", {"mtp_use_dedicated_embeddings": True}),
    "a tensor of an embedding": (
        Unsupported, r"'mtp\.embed_tokens\.weight' is not part", {"tensors": {"mtp.embed_tokens.weight": WIDE}},
    ),
    "a second layer": (
        Unsupported, r"'mtp\.layers\.1\.input_layernorm\.weight' is not part",
        {"tensors": {"mtp.layers.1.input_layernorm.weight": WIDE[:, 0]}},
    ),
    "experts": (
        Unsupported, r"'mtp\.layers\.0\.mlp\.experts\.0\.up_proj\.weight' is not part",
        {"tensors": {"mtp.layers.0.mlp.experts.0.up_proj.weight": WIDE}},
    ),
    "a map of its own": (Unsupported, r"'mtp\.d2t' is not part", {"tensors": {"mtp.d2t": np.zeros(9, np.int64)}}),
    "a missing tensor": (InvalidInput, r"'mtp\.norm\.weight' is missing", {"tensors": {"mtp.norm.weight": None}}),
    "a wrong width": (InvalidInput, r"not \[64, 128\]", {"tensors": {"mtp.fc.weight": WIDE}}),
    "integers": (Unsupported, "floats are read", {"tensors": {"mtp.fc.weight": np.zeros((64, 128), np.int64)}}),
    "not a number": (InvalidInput, "infinite", {"tensors": {"mtp.fc.weight": np.full((64, 128), np.nan, "f4")}}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_part_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    error, words, changed = REFUSED[name]
    model = write_mtp_model(tmp_path / "model", **changed)
    target = open_source(model).spec
    for folder in (model, part_alone(model, tmp_path / "alone")):
        with pytest.raises(error, match=words) as raised:
            read_head(folder, target)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_other_models_and_checkpoints_without_the_part_are_refused(tmp_path: Path) -> None:
    model = write_mtp_model(tmp_path / "model")
    target = open_source(model).spec
    others: list[dict[str, Any]] = [
        {"hidden_size": 32},
        {"num_hidden_layers": 2, "layer_types": None, "full_attention_interval": 2},
    ]
    for number, changed in enumerate(others):
        other = write_mtp_model(tmp_path / str(number), **changed)
        with pytest.raises(InvalidInput, match="is the checkpoint of another model than model"):
            read_head(other, target)
    with TensorFolder.open(model) as whole:
        rewrite(model, {name: whole.array(name).copy() for name in whole.entries if not name.startswith("mtp.")})
    with pytest.raises(InvalidInput, match=r"holds no mtp\.\* tensors"):
        read_head(model, target)


def test_a_damaged_sealed_config_is_refused(tmp_path: Path) -> None:
    model = write_mtp_model(tmp_path / "model")
    target = open_source(model).spec
    whole = json.loads((model / "config.json").read_text())
    layer = whole | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"draft_vocab_size": 9}, "transformer_layer_config is missing"),
        ({"transformer_layer_config": layer}, "draft_vocab_size"),
        ({"transformer_layer_config": layer, "draft_vocab_size": 2**70}, "draft_vocab_size"),
        ({"transformer_layer_config": whole, "draft_vocab_size": 9}, "not one layer of full attention"),
        ({"transformer_layer_config": layer | {"hidden_size": 32}, "draft_vocab_size": 9}, "as wide as model"),
    ]
    for changed, words in changes:
        (model / "config.json").write_text(json.dumps({"edgekit_head": "mtp", **changed}))
        with pytest.raises(InvalidInput, match=words):
            read_head(model, target)
