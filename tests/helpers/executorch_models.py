"""Programs of the executorch target, and the reference decoder's answers for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runtimes
import torch
from edgekit_executorch.decoder import ExecutorchDecoder
from edgekit_executorch.engine import ExecutorchEngine
from edgekit_executorch.layout import INT8_BITS, PROGRAM
from edgekit_executorch.operators import register_for_tracing
from edgekit_executorch.quiet import quiet_output
from engines import PLANS, Model, program

from edgekit.artifact.artifact import Artifact, seal
from edgekit.common.files import write_file
from edgekit.common.staging import staging_for
from edgekit.contracts.engine import Chunk
from edgekit.contracts.neutral import NeutralWeights
from edgekit.quant import reference_decoder as reference
from examples.benchmarks.xnnpack_in_order import InOrderForward, has_vnni, kernel_offset

SLOTS = PLANS["executorch"]["context"]
SHARED: dict[str, Any] = {"config": {"vocab_size": 512}}  # of programs that several files open: lowering takes long


def usual() -> Model:
    """A program with s4 layers, biases, a tied head and an exit."""
    return program("qwen2", exits=(1,))


def reference_logits(weights: NeutralWeights, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Logits [token, vocabulary] of the dequantised weights in float32."""

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(weights.tensor(name)))

    found: np.ndarray[Any, Any] = reference.logits(
        weights.model, tensor, torch.tensor(list(tokens)), context_tokens=SLOTS
    ).numpy()
    return found


PIECES = ((0, 16), (16, 7), *((index, 1) for index in range(23, 40)))


def engine_logits(engine: ExecutorchEngine, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Logits of forty tokens: chunks first, then one by one."""
    assert len(tokens) == sum(size for _, size in PIECES)
    state, found = engine.start(engine.plan.storage), []
    for start, size in PIECES:
        found.append(engine.forward([Chunk(state, tokens[start : start + size], size)])[0])
    state.close()
    return np.concatenate(found)


def decoder_of(made: Model) -> ExecutorchDecoder:
    """The decoder that was lowered, run by torch."""
    register_for_tracing()
    with quiet_output(), torch.no_grad():
        int8_kv = made.plan.storage.kv_bits == INT8_BITS
        return ExecutorchDecoder(made.weights, slots=SLOTS, context=made.plan.context, int8_kv=int8_kv)


def in_order(decoder: ExecutorchDecoder) -> InOrderForward:
    """The decoder with sums in the order of the kernels; skips the test on processors without VNNI."""
    if kernel_offset() is None:
        assert not has_vnni(), "the order that is spelled out is no longer it"
        pytest.skip("XNNPACK's kernels for this processor sum in an order that is not known")
    return InOrderForward(decoder)


def in_pieces(
    reference: torch.nn.Module, tokens: Sequence[int], pieces: Iterable[tuple[int, int]]
) -> np.ndarray[Any, Any]:
    """Logits of all tokens from torch, fed in these pieces (start, size)."""
    with torch.no_grad():
        found = [
            reference(torch.tensor([tokens[start : start + size]]), torch.tensor([start]), torch.arange(size)).numpy()
            for start, size in pieces
        ]
    return np.concatenate(found)


def logits_in_order(made: Model, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    return in_pieces(in_order(decoder_of(made)), tokens, PIECES)


def sealed_program(folder: Path, family: str, recipe: str, kv_bits: int, *, layers: int = 1) -> Artifact:
    """A sealed artifact of a family, with a tokenizer."""
    made = program(family, recipe, layers=layers, kv_bits=kv_bits, **SHARED)
    staging = staging_for(folder / "artifact", 1 << 24)
    shutil.copyfile(made.files / PROGRAM, staging / PROGRAM)
    write_file(staging / "tokenizer.json", runtimes.byte_level().to_str().encode())
    return seal(
        staging, folder / "artifact", made.plan, weights_sha256=made.weights.sha256, tools={}, self_check="none"
    )
