"""Which models are rerankers, by their files; those that edgekit does not compute are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgekit.errors import EdgekitError
from edgekit.model.parts import Reranking
from edgekit.model.reranking import SYSTEM
from edgekit.model.source import open_source

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
LOGIT_SCORE = [{"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}]


def written(folder: Path, files: dict[str, object] | None = None, **changed: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def test_a_language_model_is_a_reranker_by_its_name_its_prompt_or_vllms_fields(tmp_path: Path) -> None:
    found = Reranking(kind="qwen3")
    assert open_source(written(tmp_path / "plain")).spec.reranking is None
    assert open_source(written(tmp_path / "my-Qwen3-Reranker-0.6B")).spec.reranking == found
    fields = {"is_original_qwen3_reranker": True, "classifier_from_token": ["no", "yes"]}
    assert open_source(written(tmp_path / "a", **fields)).spec.reranking == found
    template = {"tokenizer_config.json": {"chat_template": f"<|im_start|>system\n{SYSTEM}"}}
    assert open_source(written(tmp_path / "b", template)).spec.reranking == found
    modules = {"modules.json": LOGIT_SCORE, "1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": 3}}
    spec = open_source(written(tmp_path / "c", modules | template)).spec
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
        open_source(written(tmp_path / "a", files, **fields))
