"""Small random rerankers of both kinds, and their scores by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_encoders import SMALL_BERT, wordpiece
from tiny_models import write_tiny
from tokenizers import Tokenizer, processors

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
WEB_SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


def write_qwen3_reranker(folder: Path, **changed: Any) -> Path:
    """A Qwen3 whose tokenizer has the tokens `yes` and `no`; the folder's name says what it is."""
    write_tiny(folder, model_type="qwen3", architectures=["Qwen3ForCausalLM"], vocab_size=448, **changed)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    assert tokenizer.get_vocab_size() <= 448
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return folder


def qwen3_tokens(folder: Path, query: str, document: str, instruction: str = WEB_SEARCH) -> list[int]:
    """The tokens of a pair as in Qwen3-Reranker's model card."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parts = (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n",
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        AFTER,
    )
    return [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False).ids]


def qwen3_scores(folder: Path, texts: Sequence[Sequence[int]]) -> list[float]:
    """The probability of `yes` against `no` after each text, by transformers and the model card's arithmetic."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    answers = [tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")]
    scores = []
    with torch.inference_mode():
        for tokens in texts:
            last = model(torch.tensor([list(tokens)])).logits[0, -1, answers]
            scores.append(float(torch.nn.functional.softmax(last, dim=0)[1]))
    return scores


def write_cross_encoder(folder: Path, **changed: Any) -> Path:
    """A BERT with a pooler and a classifier of one label, as sentence-transformers' cross-encoders have it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tokenizer = wordpiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    config = transformers.BertConfig(
        vocab_size=tokenizer.get_vocab_size(), **(SMALL_BERT | {"num_labels": 1} | changed)
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    for name, parameter in model.named_parameters():
        small = name.startswith("bert.pooler")  # otherwise its tanh is 1 or -1 for every text
        torch.nn.init.normal_(parameter, float(name.endswith("LayerNorm.weight")), 0.05 if small else 0.2)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return folder


def cross_encoder_logits(folder: Path, query: str, documents: Sequence[str], most: int | None = None) -> list[float]:
    """The logit of each pair by transformers, pair by pair; at most `most` tokens each, as documents are cut."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if most is not None:
        tokenizer.enable_truncation(most, strategy="only_second")
    with torch.inference_mode():
        pairs = [tokenizer.encode(query, document) for document in documents]
        return [
            float(model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits)
            for pair in pairs
        ]
