"""Gemma 4's assistant: reading and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from assistants import CLUSTERS, VOCABULARY, write_assistant, write_gemma4

from edgekit.errors import EdgekitError, InvalidInput, Unsupported
from edgekit.model import assistant
from edgekit.model.heads import read_head, read_head_spec
from edgekit.model.source import open_source


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
REFUSED: dict[str, tuple[type[EdgekitError], str, dict[str, Any]]] = {
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


@pytest.mark.parametrize("name", REFUSED)
def test_an_assistant_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    error, words, changed = REFUSED[name]
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


def test_a_damaged_sealed_config_is_refused(tmp_path: Path) -> None:
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
        (sealed, "is not part of a supported head"),  # the tensors are those of a published one
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
        read_head_spec(head, open_source(model).spec, model)
    config = json.loads((head / "config.json").read_text())
    config |= {"model_type": "gemma4_unified_assistant", "architectures": ["Gemma4UnifiedAssistantForCausalLM"]}
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match=r"is not a drafting head; supported: .* gemma4_assistant"):
        read_head(head, open_source(model).spec)
