"""Tiny models as programs of the executorch target, and the reference decoder's answers for them."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import family_models as models
import numpy as np
import pytest
import runtimes
import torch
from edgekit_executorch.decoder import ExecutorchDecoder
from edgekit_executorch.engine import ExecutorchEngine
from edgekit_executorch.export import lower
from edgekit_executorch.layout import INT8_BITS, PROGRAM
from edgekit_executorch.operators import register_for_tracing
from edgekit_executorch.quiet import quiet_output

from edgekit.artifact.artifact import Artifact, seal
from edgekit.common.files import write_file
from edgekit.common.staging import staging_for
from edgekit.contracts.engine import Chunk
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import Recipe
from edgekit.quant import reference_decoder as reference
from examples.benchmarks.xnnpack_in_order import InOrderForward, has_vnni, kernel_offset

SLOTS = 96


def weights_of(
    folder: Path, family: str, recipe: Recipe | str, layers: int | None = None, **changes: Any
) -> NeutralWeights:
    """Neutral weights of a tiny random model of that family, with its first `layers` layers."""
    kind, config = models.FAMILIES[family]
    config = {**config, **changes}
    if layers is not None:
        config["num_hidden_layers"] = layers
        for by_layer in ("layer_types", "no_rope_layers"):
            if by_layer in config:
                config[by_layer] = config[by_layer][:layers]
    models.write_model(folder / "model", kind, config)
    return models.weights_of(folder / "model", recipe, folder / "store")


def plan_for(weights: NeutralWeights, **changes: Any) -> Plan:
    asked = {"context": SLOTS, "chunk_tokens": 16, "sequences": 3, "backend": "xnnpack", **changes}
    plan = models.plan_for(weights.model, weights.recipe, **asked)
    return plan.model_copy(update={"target": "executorch"})


class Made(NamedTuple):
    """A program, its plan and its weights."""

    weights: NeutralWeights
    plan: Plan
    files: Path

    def open(self, *, exact: bool = False, **changes: object) -> ExecutorchEngine:
        return ExecutorchEngine(self.plan.model_copy(update=changes), self.files, exact=exact)


def usual() -> Made:
    """A program with s4 layers, biases, a tied head and an exit."""
    return program("qwen2", "s4-g32", exits=(1,))


def program(family: str, recipe: str, layers: int = 2, config: str = "{}", **changes: Any) -> Made:
    """Lowering takes seconds, so each program is lowered once for all tests of a process."""
    return _program(family, recipe, layers, config, tuple(changes.items()))


@cache
def _program(family: str, recipe: str, layers: int, config: str, changes: tuple[tuple[str, Any], ...]) -> Made:
    folder = Path(tempfile.mkdtemp(prefix="edgekit-program-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    weights = weights_of(folder, family, recipe, layers=layers, **json.loads(config))
    plan = plan_for(weights, **dict(changes))
    with quiet_output():
        lower(plan, weights, folder / PROGRAM, quiet)
    return Made(NeutralWeights.open(weights.folder), plan, folder)  # what lowering mapped would stay open


def reference_logits(weights: NeutralWeights, tokens: Sequence[int], context: int = SLOTS) -> np.ndarray[Any, Any]:
    """Logits [token, vocabulary] of the dequantised weights in float32."""

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(weights.tensor(name)))

    found: np.ndarray[Any, Any] = reference.logits(
        weights.model, tensor, torch.tensor(list(tokens)), context_tokens=context
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


def decoder_of(made: Made) -> ExecutorchDecoder:
    """The decoder that was lowered, run by torch."""
    register_for_tracing()
    with quiet_output(), torch.no_grad():
        return ExecutorchDecoder(
            made.weights, slots=SLOTS, positions=SLOTS, context=made.plan.context,
            int8_kv=made.plan.storage.kv_bits == INT8_BITS,
        )  # fmt: skip


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


def logits_in_order(made: Made, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    return in_pieces(in_order(decoder_of(made)), tokens, PIECES)


def apart(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The largest difference, as a share of the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def quiet(done: float, total: float, what: str) -> None:
    assert 0 <= done <= total and what


def sealed_program(folder: Path, family: str, recipe: str, vocabulary: int, kv_bits: int) -> Artifact:
    """A sealed artifact of two layers of a family, with a tokenizer."""
    weights = weights_of(folder, family, recipe, layers=2, vocab_size=vocabulary)
    plan = plan_for(weights, kv_bits=kv_bits)
    staging = staging_for(folder / "artifact", 1 << 24)
    with quiet_output():
        lower(plan, weights, staging / PROGRAM, quiet)
    write_file(staging / "tokenizer.json", runtimes.byte_level().to_str().encode())
    return seal(staging, folder / "artifact", plan, weights_sha256=weights.sha256, tools={}, self_check="a test")
