"""Encoders: BERT and the rerankers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_encoders import SMALL_BERT, write_bert, write_modules
from tiny_rerankers import write_cross_encoder

from edgekit.errors import EdgekitError, InvalidInput, Unsupported
from edgekit.model.families import model_from_config
from edgekit.model.families.bert import name_of
from edgekit.model.parts import Encoder, Reranking, TextEmbedding
from edgekit.model.reranking import SYSTEM
from edgekit.model.source import open_source, open_tensors

CONFIG: dict[str, Any] = SMALL_BERT | {"model_type": "bert", "vocab_size": 30}


@pytest.mark.quantize
def test_tensors_and_parameters_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = open_source(write_bert(tmp_path / "bert"), need_weights=True)
    spec, model = source.spec, transformers.BertModel.from_pretrained(source.folder, add_pooling_layer=False)
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert {tensor.name: tensor.shape for tensor in spec.tensors()} == {
        name_of(name): tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    with open_tensors(source.weights) as tensors:
        theirs = model.encoder.layer[1].attention.self.key.weight.detach().numpy()
        assert (tensors.floats("model.layers.1.self_attn.k_proj.weight") == theirs).all()
    assert spec.encoder == Encoder(positions=96, token_types=2) and source.quantised_as is None


@pytest.mark.parametrize(
    ("stored", "ours"),
    [
        ("bert.embeddings.word_embeddings.weight", "model.embed_tokens.weight"),
        ("encoder.layer.11.output.dense.bias", "model.layers.11.mlp.down_proj.bias"),
        ("pooler.dense.weight", "model.pooler.dense.weight"),
        ("classifier.weight", "classifier.weight"),
        ("encoder.layer.1.crossattention.self.query.weight", "encoder.layer.1.crossattention.self.query.weight"),
    ],
)
def test_names(stored: str, ours: str) -> None:
    assert name_of(stored) == ours


@pytest.mark.parametrize(
    ("field", "value"),
    [("position_embedding_type", "relative_key"), ("is_decoder", True), ("hidden_act", "silu"), ("hidden_act", "relu")],
)
def test_variants_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(Unsupported, match=f"{field}: .* is not supported"):
        model_from_config(CONFIG | {field: value}, "x", "config.json")


@pytest.mark.quantize
def test_a_classifier_is_no_embedder(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    folder = write_bert(tmp_path / "bert")
    tensors = safetensors.load_file(folder / "model.safetensors")
    safetensors.save_file(tensors | {"classifier.weight": torch.zeros(1, 64)}, folder / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"not in a bert model: classifier\.weight"):
        open_source(folder)


def written(folder: Path, **changed: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_modules(folder, "mean")
    for name, content in changed.items():
        (folder / name.replace("__", "/").replace("DOT", ".")).write_text(json.dumps(content))
    return folder


def test_the_files_of_sentence_transformers_say_how_to_embed(tmp_path: Path) -> None:
    spec = open_source(written(tmp_path / "a")).spec
    prompts = {"query": "the cat ", "document": ""}
    assert spec.embedding == TextEmbedding(pooling="mean", normalise=True, max_tokens=64, prompts=prompts)
    newer = {"embedding_dimension": 64, "pooling_mode": "lasttoken", "include_prompt": True}
    assert open_source(written(tmp_path / "b", **{"1_Pooling__configDOTjson": newer})).spec.embedding == TextEmbedding(
        pooling="last", normalise=True, max_tokens=64, prompts=prompts
    )
    (tmp_path / "a" / "modules.json").unlink()
    assert open_source(tmp_path / "a").spec.embedding is None
    for fields, lengths in (({"is_matryoshka": True}, ()), ({"matryoshka_dimensions": [8, 16]}, (8, 16))):
        (tmp_path / "a" / "config.json").write_text(json.dumps(CONFIG | fields))
        assert open_source(tmp_path / "a").spec.embedding == TextEmbedding(dimensions=lengths)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("modulesDOTjson", [{"type": "sentence_transformers.models.LSTM"}], "step 'LSTM' is not supported"),
        ("modulesDOTjson", {"a": 1}, "must be a list of objects"),
        ("1_Pooling__configDOTjson", {"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len.* is not supported"),
        ("1_Pooling__configDOTjson", {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "is not supp"),
        ("1_Pooling__configDOTjson", {"pooling_mode_cls_token": True, "include_prompt": False}, "include_prompt"),
        ("sentence_bert_configDOTjson", {"max_seq_length": "many"}, "max_tokens"),
        ("config_sentence_transformersDOTjson", {"default_prompt_name": "x"}, "is not among the prompts"),
        ("config_sentence_transformersDOTjson", {"prompts": [1]}, "prompts"),
    ],
)
def test_unsupported_sentence_transformers_modules_are_refused(
    tmp_path: Path, file: str, content: object, said: str
) -> None:
    with pytest.raises(EdgekitError, match=said):
        open_source(written(tmp_path / "a", **{file: content}))


@pytest.mark.quantize
def test_a_classifier_of_one_label_is_a_reranker(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = open_source(write_cross_encoder(tmp_path / "cross"), need_weights=True)
    model = transformers.BertForSequenceClassification.from_pretrained(source.folder)
    spec = source.spec
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert {tensor.name: tensor.shape for tensor in spec.tensors()} == {
        name_of(name): tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert spec.reranking == Reranking(kind="classifier") and spec.encoder is not None and spec.encoder.classifier
    identity = {"activation_fn": "torch.nn.modules.linear.Identity", "model_type": "CrossEncoder"}
    (source.folder / "config_sentence_transformers.json").write_text(json.dumps(identity))
    assert open_source(source.folder).spec.reranking == Reranking(kind="classifier", activation="identity")


RANKER = CONFIG | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "with 2 labels is not supported"),
        ({"id2label": None}, "with 2 labels is not supported"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, "Tanh' is not supported"),
        ({"sentence_transformers": {"activation_fn": "my.Own"}}, "my.Own' is not supported"),
        ({"sentence_transformers": {"pooling": 1}}, "pooling: .* is not a known field"),
        ({"classifier_layers": 2}, "classifier_layers: .* is not a known field"),
    ],
)
def test_other_classifiers_are_refused(fields: dict[str, object], said: str) -> None:
    assert model_from_config(RANKER, "x", "config.json").reranking is not None
    with pytest.raises(Unsupported, match=said):
        model_from_config(RANKER | fields, "x", "config.json")


CONFIG_OF_RERANKING: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


LOGIT_SCORE = [{"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}]


def written_of_reranking(folder: Path, files: dict[str, object] | None = None, **changed: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG_OF_RERANKING | changed))
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def test_a_language_model_is_a_reranker_by_its_name_its_prompt_or_vllms_fields(tmp_path: Path) -> None:
    found = Reranking(kind="qwen3")
    assert open_source(written_of_reranking(tmp_path / "plain")).spec.reranking is None
    assert open_source(written_of_reranking(tmp_path / "my-Qwen3-Reranker-0.6B")).spec.reranking == found
    fields = {"is_original_qwen3_reranker": True, "classifier_from_token": ["no", "yes"]}
    assert open_source(written_of_reranking(tmp_path / "a", **fields)).spec.reranking == found
    template = {"tokenizer_config.json": {"chat_template": f"<|im_start|>system\n{SYSTEM}"}}
    assert open_source(written_of_reranking(tmp_path / "b", template)).spec.reranking == found
    modules = {"modules.json": LOGIT_SCORE, "1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": 3}}
    spec = open_source(written_of_reranking(tmp_path / "c", modules | template)).spec
    assert spec.reranking == Reranking(kind="qwen3", yes=7, no=3) and spec.embedding is None


@pytest.mark.parametrize(
    ("files", "fields", "said"),
    [
        ({}, {"classifier_from_token": ["false", "true"]}, "classifier_from_token: .* is not supported"),
        ({}, {"is_original_qwen3_reranker": True, "model_type": "llama"}, "is not supported in llama"),
        ({}, {"is_original_qwen3_reranker": 1}, "is neither true nor false"),
        ({"modules.json": LOGIT_SCORE}, {}, "step LogitScore is only supported with"),
        (
            {"modules.json": LOGIT_SCORE, "1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": None}},
            {"is_original_qwen3_reranker": True},
            "false_token_id: .* is not supported",
        ),
    ],
)
def test_other_rerankers_are_refused(
    tmp_path: Path, files: dict[str, object], fields: dict[str, object], said: str
) -> None:
    with pytest.raises(EdgekitError, match=said):
        open_source(written_of_reranking(tmp_path / "a", files, **fields))
