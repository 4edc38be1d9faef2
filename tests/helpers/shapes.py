"""Specs of configs, and the published shapes that most tests of sizes take."""

from __future__ import annotations

from configs import (  # noqa: F401 - tests import them from here
    GEMMA_2_2B,
    GEMMA_3_1B,
    LLAMA_2_70B,
    LLAMA_31_8B,
    LLAMA_32_1B,
    LLAMA_32_3B,
    QWEN_25_7B,
    Config,
)

from edgekit.model.families import model_from_config
from edgekit.model.spec import ModelSpec


def spec_of(config: Config, name: str = "model") -> ModelSpec:
    return model_from_config(config, name, "config.json")
