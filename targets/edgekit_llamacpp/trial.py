"""Tries llama.cpp's library on a small random model: `python -m edgekit_llamacpp.trial`.

A library that was compiled for another processor, or wrongly, ends the process or computes nonsense. So one that the
user named is first tried in a separate process. There, a text must have about the same logits whether it is computed
in one call or token by token, because the two use other kernels.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import EdgekitError, TargetFailed
from edgekit.formats.gguf_writer import MetadataValue, WrittenTensor, q4_0, q8_0, write_gguf
from edgekit_llamacpp import library, structs
from edgekit_llamacpp.context import Context, ContextShape, Feed, StopFlag
from edgekit_llamacpp.library import Library

_WIDTH, _INNER, _HEADS, _VOCABULARY, _TOKENS, _ROWS = 256, 512, 4, 256, 80, 8
_MOST_APART = 0.5  # of logits with a deviation of about 1; 0.05 with the pinned library's flash attention, else 0
_METADATA: dict[str, MetadataValue] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 256,
    "llama.embedding_length": _WIDTH,
    "llama.feed_forward_length": _INNER,
    "llama.attention.head_count": _HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": _VOCABULARY,
    "tokenizer.ggml.model": "none",
}


def check(tried: Library) -> None:
    """Raise `TargetFailed` if the library cannot run the model, or computes nonsense."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trial.gguf"
        write_gguf(path, _METADATA, list(_tensors()))
        params = tried.llama_model_default_params()
        params.devices, params.n_gpu_layers = ctypes.addressof(structs.NO_DEVICES), 0
        model = tried.llama_model_load_from_file(bytes(path), params)
        if not model:
            raise tried.failure("a trial model could not be loaded")
        for exact in (False, True):
            apart = _difference(tried, model, exact=exact)
            if not apart < _MOST_APART:  # NaN is nonsense too
                raise TargetFailed(
                    f"llamacpp: {tried.path.name} computes wrongly: its logits differ by {apart:.2g} between calls"
                )
        tried.llama_model_free(model)


def _difference(tried: Library, model: int, *, exact: bool) -> float:
    """Return the largest difference of a logit between one call and a call for each token."""
    shape = ContextShape(kv_bits=16, capacity_tokens=256, sequences=2, batch_tokens=_TOKENS, threads=1, exact=exact)
    context = Context(tried, model, _VOCABULARY, shape, StopFlag())
    tokens = list(range(_TOKENS))
    together = context.decode([Feed(0, 0, tokens, _ROWS)])[0]
    alone = [context.decode([Feed(1, index, [token], 1)])[0] for index, token in enumerate(tokens)][-_ROWS:]
    context.close()
    return float(np.abs(together - np.concatenate(alone)).max())


def _tensors() -> Iterator[WrittenTensor]:
    random = np.random.default_rng(0)
    for name, kind, rows, width in (
        ("token_embd", "F16", _VOCABULARY, _WIDTH), ("output", "Q4_0", _VOCABULARY, _WIDTH),
        ("blk.0.attn_q", "Q4_0", _WIDTH, _WIDTH), ("blk.0.attn_k", "Q8_0", _WIDTH, _WIDTH),
        ("blk.0.attn_v", "Q4_0", _WIDTH, _WIDTH), ("blk.0.attn_output", "Q4_0", _WIDTH, _WIDTH),
        ("blk.0.ffn_gate", "Q4_0", _INNER, _WIDTH), ("blk.0.ffn_up", "F16", _INNER, _WIDTH),
        ("blk.0.ffn_down", "Q8_0", _WIDTH, _INNER),
    ):  # fmt: skip
        yield _tensor(name, kind, random.standard_normal((rows, width), np.float32) / np.float32(width**0.5))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        yield _tensor(name, "F32", np.ones(_WIDTH, np.float32))


def _tensor(name: str, kind: str, values: NDArray[np.float32]) -> WrittenTensor:
    return WrittenTensor(f"{name}.weight", kind, values.shape, lambda: iter([_PACKED[kind](values)]))


def _quantised(pack: Callable[..., NDArray[np.uint8]], most: int) -> Callable[[NDArray[np.float32]], NDArray[Any]]:
    def packed(values: NDArray[np.float32]) -> NDArray[Any]:
        scale = np.abs(values).max() / most
        return pack(np.rint(values / scale).astype(np.int8), np.full((len(values), 1), scale, np.float32))

    return packed


_PACKED: dict[str, Callable[[NDArray[np.float32]], NDArray[Any]]] = {
    "F32": lambda values: values,
    "F16": lambda values: values.astype(np.float16),
    "Q4_0": _quantised(q4_0, 7),
    "Q8_0": _quantised(q8_0, 127),
}


def _main() -> None:
    try:
        check(library.opened())
    except EdgekitError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main()
