"""Registers ExecuTorch's own operators with torch, for tracing and for running; importing them is what registers."""

from __future__ import annotations

import importlib

from edgekit_executorch.hushed import hushed


def register() -> None:
    """llama.* (cache and attention) and quantized_decomposed.* (the table of tokens)."""
    with hushed():
        importlib.import_module("executorch.extension.llm.custom_ops.custom_ops")
        importlib.import_module("executorch.kernels.quantized")
        importlib.import_module("executorch.exir.passes._quant_patterns_and_replacements")
