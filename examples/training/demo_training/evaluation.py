"""Figures on held-out text: perplexity, agreement of draft and target, and chats."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from examples.training.demo_training.chat import conversations, render
from examples.training.demo_training.llama import ASSISTANT, END, Llama
from examples.training.demo_training.tokens import chat_tokens, text_tokens

WINDOW = 512
FILE_TOKENS = 2000
MAX_CHATS = 100


def held_out_figures(target: Llama, draft: Llama, tokenizer: Tokenizer, texts: list[str]) -> dict[str, float]:
    """Return both perplexities, greedy agreement and the mean of sum(min(p, q)), in float32.

    Of each text the start token and the first 2000 tokens, in windows of 512.
    """
    sums = {"target": 0.0, "draft": 0.0, "agreement": 0.0, "overlap": 0.0}
    count = 0
    for window in _windows(text_tokens(tokenizer, texts)):
        known, following = window[None, :-1], window[1:]
        p, q = (_log_probabilities(model, known)[0] for model in (target, draft))
        following = following.to(p.device)
        sums["target"] += float(functional.nll_loss(p, following, reduction="sum"))
        sums["draft"] += float(functional.nll_loss(q, following, reduction="sum"))
        sums["agreement"] += float((p.argmax(-1) == q.argmax(-1)).sum())
        sums["overlap"] += float(torch.minimum(p.exp(), q.exp()).sum())
        count += len(following)
    means = {name: each / max(1, count) for name, each in sums.items()}
    return {
        "tokens": count,
        "target_perplexity": float(torch.tensor(means["target"]).exp()),
        "draft_perplexity": float(torch.tensor(means["draft"]).exp()),
        "greedy_agreement": means["agreement"],
        "sum_min_p_q": means["overlap"],
        **chat_figures(target, tokenizer, texts),
    }


def chat_figures(model: Llama, tokenizer: Tokenizer, texts: list[str]) -> dict[str, float]:
    """Return the perplexity of held-out answers, and the mean probability of ending where they end."""
    talks = [render(talk) for text in texts for talk in conversations(text)][:MAX_CHATS]
    loss, ending, count, ends = 0.0, 0.0, 0, 0
    for row in chat_tokens(tokenizer, talks):
        tokens = torch.tensor(row[:WINDOW])
        place = row.index(ASSISTANT)
        stop = len(row) - 1 - row[::-1].index(END)
        if stop >= len(tokens):
            continue
        found = _log_probabilities(model, tokens[None, :-1])[0].cpu()
        answer = slice(place, stop)
        loss += float(functional.nll_loss(found[answer], tokens[place + 1 : stop + 1], reduction="sum"))
        count += stop - place
        ending += float(found[stop - 1, END].exp())
        ends += 1
    if not ends:
        return {}
    return {"chat_perplexity": float(torch.tensor(loss / count).exp()), "chat_end": ending / ends}


@torch.inference_mode()
def _log_probabilities(model: Llama, tokens: Tensor) -> Tensor:
    device = model.embed_tokens.weight.device
    logits: Tensor = model(tokens.to(device))
    return logits.float().log_softmax(-1)


def _windows(rows: list[list[int]]) -> Iterator[Tensor]:
    for row in rows:
        known = torch.tensor(row[:-1][: FILE_TOKENS + 1])
        for start in range(0, len(known) - 1, WINDOW):
            yield known[start : start + WINDOW + 1]
