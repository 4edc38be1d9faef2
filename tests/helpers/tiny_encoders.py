"""A small random BERT with WordPiece and the files of sentence-transformers, and its hidden states by transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ["the", "cat", "sat", "on", "mat", "##s", "##ing", "a", "dog", "ran", "over", "hill", ".", "naive"]
SMALL_BERT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 96, "type_vocab_size": 2, "hidden_act": "gelu",
}  # fmt: skip


def wordpiece() -> Tokenizer:
    """BERT's tokenizer over a few words."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordPiece({piece: place for place, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def write_bert(folder: Path, **changed: Any) -> Path:
    """A folder as sentence-transformers has it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizer = wordpiece()
    config = transformers.BertConfig(vocab_size=tokenizer.get_vocab_size(), **(SMALL_BERT | changed))
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    write_modules(folder, "mean")
    return folder


def write_modules(
    folder: Path, pooling: str, *, steps: Sequence[str] = ("Transformer", "Pooling", "Normalize")
) -> None:
    """sentence-transformers' files."""
    listed = [{"idx": place, "type": f"sentence_transformers.models.{step}"} for place, step in enumerate(steps)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}_tokens": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    prompts = {"prompts": {"query": "the cat ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def hidden_states(folder: Path, tokens: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """The hidden states [tokens, width] of each text by transformers, text by text."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        return [model(torch.tensor([list(each)])).last_hidden_state[0].numpy() for each in tokens]


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors of length 1."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


DENSE = {"2_Dense": (64, 96), "3_Dense": (96, 48)}


def write_embedding_gemma(folder: Path, *, seed: int = 0, **changed: Any) -> Path:
    """A folder as EmbeddingGemma has it: attention in both directions, windows, and two dense layers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    save = pytest.importorskip("safetensors.torch").save_file
    tokenizer = wordpiece()
    small = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "max_position_embeddings": 96,
        "sliding_window": 16, "use_bidirectional_attention": True, "pad_token_id": 0, "bos_token_id": 2,
        "eos_token_id": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
    }  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.Gemma3TextModel(
        transformers.Gemma3TextConfig(vocab_size=tokenizer.get_vocab_size(), **(small | changed))
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    write_modules(folder, "mean", steps=("Transformer", "Pooling", "Dense", "Dense", "Normalize"))
    steps = json.loads((folder / "modules.json").read_text())
    for step, (name, (inputs, outputs)) in zip(steps[2:4], DENSE.items(), strict=True):
        step["path"] = name
        (folder / name).mkdir()
        described = {"in_features": inputs, "out_features": outputs, "bias": False}
        described["activation_function"] = "torch.nn.modules.linear.Identity"
        (folder / name / "config.json").write_text(json.dumps(described))
        save({"linear.weight": torch.randn(outputs, inputs) * 0.2}, folder / name / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(steps))
    return folder


def dense_vectors(folder: Path, pooled: NDArray[np.float32]) -> NDArray[np.float32]:
    """Pooled vectors through the dense layers, in sentence-transformers' order."""
    load = pytest.importorskip("safetensors.numpy").load_file
    for name in DENSE:
        pooled = pooled @ load(folder / name / "model.safetensors")["linear.weight"].T
    return pooled
