"""The target's own outputs and its hidden states beside them, in files that a run which was killed goes on from."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LENGTH, BATCH = 256, 32
_MAX_CHARACTERS = 20_000


class Text(NamedTuple):
    """A text to cut prompts from. A chat is cut at its end, where the model's turn begins, and others anywhere."""

    text: str
    is_chat: bool = False


def texts(place: Path | None, tokenizer: Any) -> list[Text]:
    """The texts of a folder, or of lines `{"text": ...}` and `{"messages": [...]}`; else Python's standard library."""
    if place is not None and place.is_file():
        lines = [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]
        return [_rendered(line["messages"], tokenizer) if "messages" in line else Text(line["text"]) for line in lines]
    folder = place or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in (".py", ".txt", ".md") and "site-packages" not in path.parts and path.is_file()
    )
    if not paths:
        raise SystemExit(f"{folder}: holds no .py, .txt or .md file; name a folder or lines of JSON with --text")
    return [Text(path.read_text(encoding="utf-8", errors="ignore")[:_MAX_CHARACTERS]) for path in paths]


def _rendered(messages: list[dict[str, str]], tokenizer: Any) -> Text:
    return Text(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), is_chat=True)


def prompts(tokenizer: Any, given: list[Text], count: int, tokens: int, seed: int) -> Iterator[Tensor]:
    """Batches of `count` prompts of `tokens` tokens in all."""
    draw = np.random.default_rng(seed)
    long = [each for each in given if each.is_chat or len(each.text) >= 8 * tokens]
    if not long:
        raise SystemExit(f"no text has {8 * tokens} characters; give longer ones with --text")
    misses = 0
    for _ in range(-(-count // BATCH)):
        rows = list[list[int]]()
        while len(rows) < BATCH:
            text, is_chat = long[int(draw.integers(len(long)))]
            ids = tokenizer(text, add_special_tokens=not is_chat)["input_ids"]
            start = max(0, len(ids) - tokens) if is_chat else int(draw.integers(0, max(1, len(ids) - tokens)))
            if len(ids) >= start + tokens:
                rows.append(ids[start : start + tokens])
                misses = 0
            elif (misses := misses + 1) > 1000:
                raise SystemExit(f"no text has {tokens} tokens; give longer ones with --text, or fewer --prompt-tokens")
        yield torch.tensor(rows)


def collect(model: Any, batches: Iterator[Tensor], layers: tuple[int, ...], folder: Path, seed: int) -> list[Path]:
    """Write what the model answers to each batch, and its hidden states; batches that are there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for index, prompt in enumerate(batches):
        path = folder / f"{index:04d}.safetensors"
        files.append(path)
        if path.exists():
            continue
        torch.manual_seed(seed * 100_003 + index)
        with torch.no_grad():
            prompt = prompt.to(model.device)
            tokens = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=index % 2 == 0, temperature=0.8, top_k=0,
                max_new_tokens=LENGTH - prompt.shape[1], min_new_tokens=LENGTH - prompt.shape[1], pad_token_id=0,
            )  # fmt: skip
            states = model.model(tokens, output_hidden_states=True)
        rows = {
            "tokens": tokens.int(),
            # The last of transformers' hidden states is normed: the input of the target's head.
            "hidden": torch.cat([states.hidden_states[layer] for layer in layers], -1).bfloat16(),
            "last": states.last_hidden_state.bfloat16(),
        }
        written = path.with_suffix(".part")
        save_file({name: value.contiguous().cpu() for name, value in rows.items()}, written)
        written.replace(path)
        print(f"outputs: {index + 1} batches, {(index + 1) * tokens.numel():,} tokens", flush=True)
    return files


def read(path: Path, device: torch.device) -> dict[str, Tensor]:
    return {
        name: value.to(device).float() if name != "tokens" else value.to(device).long()
        for name, value in load_file(path).items()
    }
