"""Folders in the layout of Hugging Face, and the card that says what stands in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from edgekit.common.files import write_file
from examples.training.demo_training.chat import template_text
from examples.training.demo_training.llama import BOS, END, EOS, PAD, Llama, checkpoint_tensors

MAX_BYTES = 36_000_000


class Trained(NamedTuple):
    """A model, the tokens of this run, and the folder whose weights it began with."""

    model: Llama
    tokens: int
    begun_with: Path | None

    @property
    def tokens_seen(self) -> int:
        """The figures of all known runs."""
        return self.tokens + (_tokens_before(self.begun_with) or 0)

    def beginning(self) -> str:
        if self.begun_with is None:
            return "began with random weights"
        uncounted = "" if _tokens_before(self.begun_with) else ", whose own tokens are not counted here"
        return f"went on from the weights of `{self.begun_with.name}`{uncounted}"


def _tokens_before(folder: Path | None) -> int | None:
    """Return the training history of the weights in a folder, if the folder records one."""
    if folder is None or not (folder / "training.json").exists():
        return None
    return int(json.loads((folder / "training.json").read_text())["tokens_seen"])


def write_model(folder: Path, trained: Trained, tokenizer: bytes) -> int:
    """Write one model in fp16 with all that belongs to it; returns the bytes of its weights."""
    model = trained.model
    half = {name: each.to("cpu", torch.float16).contiguous() for name, each in checkpoint_tensors(model).items()}
    weights = save(half, {"format": "pt"})
    texts: dict[str, Any] = {
        "training.json": {"tokens_seen": trained.tokens_seen},
        "config.json": model.shape.config(),
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": [EOS, END], "pad_token_id": PAD},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|pad|>",
            "model_max_length": model.shape.max_positions,
        },
    }
    for name, value in texts.items():
        write_file(folder / name, (json.dumps(value, indent=2) + "\n").encode())
    write_file(folder / "chat_template.jinja", template_text().encode())
    write_file(folder / "tokenizer.json", tokenizer)
    write_file(folder / "model.safetensors", weights)
    return len(weights)


def card(
    models: dict[str, Trained],
    figures: dict[str, float],
    sources: dict[str, Any],
    lengths: str,
) -> str:
    """The model card, in Markdown: sizes, figures, data with licences and versions, use, licence."""
    rows = "\n".join(_row(name, trained, lengths, figures) for name, trained in models.items())
    packages = [f"{each['name']} {each['version']} ({_short(each['licence'])})" for each in sources["packages"]]
    begun = ", ".join(f"the {name} {trained.beginning()}" for name, trained in models.items())
    vocabulary = models["target"].model.shape.vocabulary
    seen, chats = sources["tokens"] / 1e6, sources["chat_tokens"] / 1e6
    return f"""# The demo models

Two small Llama models with one tokenizer (byte-level BPE, {vocabulary} tokens).
`examples/training/train_demo.py` trained them; {begun}.

| | parameters | layers × hidden | heads / KV heads × dim | tokens seen | perplexity | context |
|---|---|---|---|---|---|---|
{rows}

- **Data**: {sources["files"]:,} Python files of 400 to 150,000 characters, without those that mostly copy others, and
  conversations made from their documented functions: {seen:.1f} M tokens, {chats:.1f} M of them conversations.
- **Held out**: {sources["held_out_files"]} files, split by file; no training file shares more than 30 % of its
  telling lines with them. The perplexities above are on the first 2000 tokens of each, windows of 512, fp32:
  {figures["tokens"]:,.0f} tokens.
- **Draft**: greedy agreement with the target {figures["greedy_agreement"]:.3f} on the held-out text; the sum of
  min(p, q) is {figures["sum_min_p_q"]:.3f}.
{_chat(figures)}- **Use**: completing Python for tests and demonstrations. They know little: do not rely on them.
- **Licence**: Apache-2.0. The training data keeps its own permissive licences.

## Sources

{", ".join(packages)}.
"""


def _chat(figures: dict[str, float]) -> str:
    if "chat_perplexity" not in figures:
        return ""
    return (
        f"- **Chat**: on conversations made from held-out functions the answers' perplexity is "
        f"{figures['chat_perplexity']:.2f};\n  the mean probability of `<|end|>` where an answer ends is "
        f"{figures['chat_end']:.3f}.\n"
    )


def _row(name: str, trained: Trained, lengths: str, figures: dict[str, float]) -> str:
    shape = trained.model.shape
    return (
        f"| `{name}/` | {trained.model.parameters_count() / 1e6:.2f} M | {shape.layers} × {shape.hidden} | "
        f"{shape.heads} / {shape.kv_heads} × {shape.head_dim} | {trained.tokens_seen / 1e6:.1f} M | "
        f"{figures[f'{name}_perplexity']:.2f} | {lengths}, rope to {shape.max_positions} |"
    )


def _short(licence: str) -> str:
    return licence if len(licence) <= 60 else licence[:57] + "..."
