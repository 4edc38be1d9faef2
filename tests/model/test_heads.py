"""Drafting heads: EAGLE-3, the MTP part of a checkpoint and Gemma 4's assistant are read or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from assistants import CLUSTERS, VOCABULARY, write_assistant, write_gemma4
from eagle3_heads import LEGACY, SPECULATORS, write_head
from mtp_heads import part_alone, write_mtp_model
from safetensors_files import write_tensors

from edgekit.errors import EdgekitError, InvalidInput, Unsupported
from edgekit.formats.safetensors import TensorFolder
from edgekit.model import assistant, mtp
from edgekit.model.eagle3 import default_layers
from edgekit.model.families import model_from_config
from edgekit.model.heads import read_head
from edgekit.model.source import open_source
from edgekit.model.spec import ModelSpec


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
        write_tensors(model, {name: whole.array(name).copy() for name in whole.entries if not name.startswith("mtp.")})
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


def test_an_assistant_with_clusters_is_read(tmp_path: Path) -> None:
    model = write_gemma4(tmp_path / "model")
    head = read_head(write_assistant(tmp_path / "head", model, clusters=CLUSTERS), open_source(model).spec)
    spec = head.spec
    assert (spec.kind, spec.hidden_layers, spec.kv_layers) == ("assistant", (6,), (2, 2, 2, 3))
    assert (spec.clusters, spec.active_clusters, spec.draft_vocab_size) == (CLUSTERS, 3, VOCABULARY)
    assert spec.width == 64 != spec.layer.hidden_size and not spec.own_embedding
    assert head.targets is not None and not np.array_equal(head.targets, np.arange(VOCABULARY))
    assert dict(spec.tensors())["pre_projection.weight"] == (48, 128)
    head.close()


def test_one_without_clusters_chooses_its_tokens_when_it_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assistant, "DRAFT_TOKENS", 270)
    model = write_gemma4(tmp_path / "model")
    head = read_head(write_assistant(tmp_path / "head", model), open_source(model).spec)
    assert (head.spec.clusters, head.spec.draft_vocab_size, head.targets) == (None, 270, None)
    head.close()


def test_it_attends_to_the_last_layers_that_store_keys_and_values(tmp_path: Path) -> None:
    model = write_gemma4(tmp_path / "model", num_kv_shared_layers=0)
    head = read_head(write_assistant(tmp_path / "head", model), open_source(model).spec)
    assert head.spec.kv_layers == (4, 4, 4, 5)
    head.close()


def test_a_head_that_is_stored_beside_its_embedding_is_read(tmp_path: Path) -> None:
    model = write_gemma4(tmp_path / "model")
    rows = np.full((VOCABULARY, 48), 2, np.float32)
    head = read_head(
        write_assistant(tmp_path / "head", model, tensors={"lm_head.weight": rows}), open_source(model).spec
    )
    assert np.array_equal(head.floats("lm_head.weight"), rows)
    head.close()


ORDER, TWICE = "masked_embedding.token_ordering", np.zeros(VOCABULARY, np.int64)


REFUSED_OF_ASSISTANT: dict[str, tuple[type[EdgekitError], str, dict[str, Any]]] = {
    "another width": (InvalidInput, "assistant of another model than model", {"config": {"backbone_hidden_size": 65}}),
    "another vocabulary": (InvalidInput, "another model than model", {"vocab_size": VOCABULARY + CLUSTERS}),
    "another window": (InvalidInput, "layer 0 attends to keys and values of the shape", {"sliding_window": 13}),
    "other heads": (InvalidInput, "layer 3 attends to keys and values of the shape", {"global_head_dim": 32}),
    "another rope": (
        InvalidInput, "layer 0 attends to keys and values",
        {"rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        }},
    ),
    "keys of its own": (Unsupported, "num_kv_shared_layers is 2 of 4 layers", {"num_kv_shared_layers": 2}),
    "inputs of layers": (Unsupported, "hidden_size_per_layer_input is 16", {"hidden_size_per_layer_input": 16}),
    "experts": (Unsupported, "enable_moe_block is True", {"enable_moe_block": True}),
    "another activation": (Unsupported, "an assistant with silu", {"hidden_activation": "silu"}),
    "no layers": (InvalidInput, "text_config is missing", {"config": {"text_config": None}}),
    "clusters that divide nothing": (InvalidInput, "num_centroids 7 does not divide", {"config": {"num_centroids": 7}}),
    "more clusters than there are": (InvalidInput, "top_k 21 is not 1 to 20", {"active": 21}),
    "a key projection": (
        Unsupported, r"'model\.layers\.0\.self_attn\.k_proj\.weight' is not part",
        {"tensors": {"model.layers.0.self_attn.k_proj.weight": np.zeros((32, 48), np.float32)}},
    ),
    "a missing tensor": (InvalidInput, "'post_projection.weight' is", {"tensors": {"post_projection.weight": None}}),
    "no order of tokens": (InvalidInput, "token_ordering' is missing", {"tensors": {ORDER: None}}),
    "a token twice": (InvalidInput, "does not name each of 360 tokens once", {"tensors": {ORDER: TWICE}}),
    "an order of other tokens": (InvalidInput, "expected I64", {"tensors": {ORDER: TWICE[1:]}}),
    "a wrong shape": (InvalidInput, r"not \[48\]", {"tensors": {"model.norm.weight": np.ones(64, np.float32)}}),
    "not a number": (InvalidInput, "infinite", {"tensors": {"model.norm.weight": np.full(48, np.nan, np.float32)}}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_OF_ASSISTANT)
def test_an_assistant_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    error, words, changed = REFUSED_OF_ASSISTANT[name]
    model = write_gemma4(tmp_path / "model")
    head = write_assistant(tmp_path / "head", model, **{"clusters": CLUSTERS, **changed})
    with pytest.raises(error, match=words) as raised:
        read_head(head, open_source(model).spec)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_biases_are_read_of_queries_alone(tmp_path: Path) -> None:
    model = write_gemma4(tmp_path / "model")
    biases = {
        f"model.layers.{layer}.self_attn.{name}.bias": np.zeros(width, np.float32)
        for layer, widths in enumerate([128, 128, 128, 256])
        for name, width in (("q_proj", widths), ("o_proj", 48))
    }
    head = read_head(
        write_assistant(tmp_path / "head", model, attention_bias=True, tensors=biases), open_source(model).spec
    )
    assert {name for name, _ in head.spec.tensors() if name.endswith("bias")} == {
        name.removeprefix("model.") for name in biases
    }
    head.close()


def test_a_damaged_sealed_config_is_refused_assistant(tmp_path: Path) -> None:
    model = write_gemma4(tmp_path / "model")
    head, target = write_assistant(tmp_path / "head", model, clusters=CLUSTERS), open_source(model).spec
    published = json.loads((head / "config.json").read_text())
    text = published["text_config"] | {"num_kv_shared_layers": 0}
    sealed = published | {"edgekit_head": "assistant", "text_config": text, "draft_vocab_size": VOCABULARY}
    plain = sealed | {"use_ordered_embeddings": False}
    changes: list[tuple[dict[str, Any], str]] = [
        (sealed | {"text_config": [1]}, "text_config is missing"),
        (plain | {"draft_vocab_size": None}, "draft_vocab_size"),
        (plain | {"draft_vocab_size": 2**70}, "draft_vocab_size"),
        (sealed, "is not part of a supported head"),  # its tensors have the names of a published head
        (sealed | {"num_centroids": "20"}, "num_centroids '20' does not divide"),
        (sealed | {"text_config": text | {"num_kv_shared_layers": 9}}, "num_kv_shared_layers"),
    ]
    for changed, words in changes:
        (head / "config.json").write_text(json.dumps(changed))
        with pytest.raises(EdgekitError, match=words):
            read_head(head, target)


def test_other_models_tokenizers_and_kinds_are_refused(tmp_path: Path) -> None:
    model = write_gemma4(tmp_path / "model")
    head = write_assistant(tmp_path / "head", model)
    llama = tiny_models.write_tiny(tmp_path / "llama", vocab_size=VOCABULARY)
    with pytest.raises(InvalidInput, match="an assistant of Gemma 4, and llama is llama"):
        read_head(head, open_source(llama).spec)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {f"other {text}": place for text, place in tokenizer["model"]["vocab"].items()}
    tokenizer["model"]["merges"] = []
    (head / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidInput):
        open_source(model).read_head(head)
    config = json.loads((head / "config.json").read_text())
    config |= {"model_type": "gemma4_unified_assistant", "architectures": ["Gemma4UnifiedAssistantForCausalLM"]}
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match=r"is not a drafting head; supported: .* gemma4_assistant"):
        read_head(head, open_source(model).spec)


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


REFUSED_OF_EAGLE3: dict[str, tuple[type[EdgekitError], str, dict[str, Any]]] = {
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


@pytest.mark.parametrize("name", REFUSED_OF_EAGLE3)
def test_a_head_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    error, words, changed = REFUSED_OF_EAGLE3[name]
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
