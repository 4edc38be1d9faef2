"""LoRA adapters: writes PEFT's matrices as a GGUF adapter, which llama.cpp applies."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgekit.formats.gguf_writer import WrittenTensor, write_gguf
from edgekit.model.lora import LoraAdapter
from edgekit.model.spec import ModelSpec
from edgekit.quant.neutral_gguf import gguf_name, model_metadata, row_order
from edgekit_llamacpp.library import Library

_ARCHITECTURE = "general.architecture"


class LlamaCppAdapter(NamedTuple):
    """One loaded adapter."""

    sha256: str
    pointer: int
    bytes: int


def load_adapter(library: Library, model: int, spec: ModelSpec, adapter: LoraAdapter) -> LlamaCppAdapter:
    """Load an adapter into llama.cpp through a temporary file."""
    tensors = list(_tensors(spec, adapter))
    metadata = {
        "general.type": "adapter",
        _ARCHITECTURE: model_metadata(spec, spec.max_positions)[_ARCHITECTURE],
        "adapter.type": "lora",
        "adapter.lora.alpha": 0.0,  # the scale is already in the second matrix
    }
    with tempfile.TemporaryDirectory(prefix="edgekit-adapter-") as folder:
        path = Path(folder) / "adapter.gguf"
        write_gguf(path, metadata, tensors)
        pointer = library.llama_adapter_lora_init(model, bytes(path))
    if not pointer:
        raise library.failure("the adapter could not be loaded")
    return LlamaCppAdapter(adapter.sha256, int(pointer), sum(tensor.bytes for tensor in tensors))


def _tensors(spec: ModelSpec, adapter: LoraAdapter) -> Iterator[WrittenTensor]:
    for tensor in spec.tensors():
        part = adapter.modules.get(tensor.module)
        if part is None or not tensor.name.endswith(".weight"):
            continue
        name, order = gguf_name(spec, tensor), row_order(spec, tensor.module)
        for side, matrix in (("a", part.a), ("b", part.b if order is None else part.b[order])):
            floats = np.ascontiguousarray(matrix, "<f4")
            yield WrittenTensor(f"{name}.lora_{side}", "F32", floats.shape, partial(iter, [floats]))
