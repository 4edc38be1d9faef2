"""Small random rerankers of both kinds, and their scores by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny
from tokenizers import Tokenizer

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
