"""Sealed artifacts of the fake target, found through an entry point as any installed package's would be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from runtimes import TEMPLATE, byte_level

from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.model.parts import Reranking, TextEmbedding
from edgekit.testing import fake_artifact, fake_model, fake_plan, install_fake_target


def make_artifact(
    folder: Path,
    *,
    window: int | None = None,
    context: int = 512,
    chat: bool = True,
    embedding: TextEmbedding | None = None,
    reranking: Reranking | None = None,
    more: Mapping[str, bytes] | None = None,
    seed: int = 0,
    **plan: Any,
) -> Path:
    """An artifact over the fake engine, with a byte-level tokenizer and (unless told otherwise) a chat template.

    `more`: files that no engine reads. Another `seed` gives other answers.
    """
    tokenizer = byte_level()
    files: dict[str, Any] = {
        **(more or {}),
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"},
        "generation_config.json": {"eos_token_id": tokenizer.token_to_id("</s>")},
    }
    if chat:
        files["chat_template.jinja"] = TEMPLATE
    model = fake_model(vocabulary=tokenizer.get_vocab_size(), eos_ids=(tokenizer.token_to_id("</s>"),))
    model = model.model_copy(update={"embedding": embedding, "reranking": reranking})
    made = fake_plan(model, context=context, cache=KVEvictionPolicy.of(window) if window else None, **plan)
    return fake_artifact(folder, files=files, plan=made, seed=seed).folder


def install(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make the fake target known to this process and to those that it starts."""
    install_fake_target(folder)
    patch.syspath_prepend(str(folder))
    patch.setenv("PYTHONPATH", str(folder))
    patch.setenv("EDGEKIT_HOME", str(folder / "home"))
