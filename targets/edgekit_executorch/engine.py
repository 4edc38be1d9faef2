"""The engine on a desktop: runs a phone's program with ExecuTorch's Python runtime.

A program has one cache, which states use in turn; see `kv_swap`. In exact mode every token is a separate call, so
that logits cannot depend on chunking.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekit.common.files import file_sha256
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import Eviction, KVCacheConfig
from edgekit.contracts.manifest import MANIFEST
from edgekit.contracts.plan import Plan
from edgekit.enginekit.base import EngineBase, LoadedAdapter
from edgekit.enginekit.kv_segment import SegmentPart
from edgekit.enginekit.rope_shift import Rotation, runs_between
from edgekit.enginekit.state import StateBase, StateOwner
from edgekit.errors import DamagedArtifact, InvalidInput
from edgekit_executorch.capabilities import capabilities
from edgekit_executorch.int8_kv import close_gap, form_of, parts_of
from edgekit_executorch.kv_swap import KVCacheSwap
from edgekit_executorch.layout import PROGRAM, Sizes, feature_layers
from edgekit_executorch.program import LoadedProgram, pool_threads

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits


class ExecutorchState(StateBase):
    """A state whose slots are positions: after an eviction, the remaining tokens count from zero again."""

    saves_evicted = True

    def __init__(self, owner: StateOwner, storage: KVCacheConfig, swap: KVCacheSwap, rotation: Rotation) -> None:
        super().__init__(owner, storage)
        self._swap, self._rotation = swap, rotation
        swap.admit(self)

    def _evict(self, spans: Sequence[Eviction]) -> None:
        arrays = self._swap.arrays(self)
        for start, stop, place in runs_between(spans, self.length):
            rotations = self._rotation.back(start - place)
            count = len(arrays) // (2 * len(rotations))  # number of arrays of a layer's keys, and of its values
            for layer, rotation in enumerate(rotations):
                first = 2 * count * layer
                close_gap(arrays[first : first + count], place, start, stop, rotation)
                close_gap(arrays[first + count : first + 2 * count], place, start, stop, None)

    def _cached_layers(self, start: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        arrays = [array[:, start : self.length] for array in self._swap.arrays(self)]
        yield from zip(arrays[::2], arrays[1::2], strict=True)  # a cache of floats has one array of keys, one of values

    def _read(self, start: int, stop: int) -> list[NDArray[Any]]:
        return [array[:, start:stop].copy() for array in self._swap.arrays(self)]

    def _write(self, arrays: Sequence[NDArray[Any]]) -> None:
        for array, saved in zip(self._swap.arrays(self), arrays, strict=True):
            array[:, self.length : self.length + saved.shape[1]] = saved


class ExecutorchEngine(EngineBase[ExecutorchState, LoadedAdapter]):
    """One artifact, opened with ExecuTorch."""

    target = "executorch"
    runs_adapters = False

    def __init__(self, plan: Plan, files: Path, *, exact: bool = False) -> None:
        super().__init__(plan)
        self._exact = exact
        path = files / PROGRAM
        # A phone's plan counts the phone's cores.
        threads = min(plan.threads, os.cpu_count() or 1)
        self._program = LoadedProgram(path, threads)
        _check_agrees(path, self._program, plan)
        self.notes = _notes(plan, threads)
        self._swap = KVCacheSwap(self._program.cache())
        self._rotation = Rotation(plan.model, plan.context)
        self._parts = [
            part
            for layer in plan.model.layers
            for _ in ("key", "value")
            for part in parts_of(layer, self._program.kv_bits)
        ]
        key = file_sha256(files / MANIFEST if (files / MANIFEST).exists() else path)
        # Do not derive this text from the code's names: saved prefixes contain its hash.
        parts = ", ".join(
            f"SegmentPart(rows={rows}, width={width}, dtype={kind!r})" for rows, width, kind in self._parts
        )
        self._model_key = hashlib.sha256(f"{key} [{parts}]".encode()).hexdigest()
        self.capabilities = capabilities(plan.model, plan.recipe, plan.backend).narrowed(
            plan,
            max_chunk_tokens=min(plan.chunk_tokens, self._program.chunk),
            kv_bits=(self._program.kv_bits,),
        )

    @property
    def model_key(self) -> str:
        return self._model_key

    def form(self, kv_bits: int) -> str:
        return form_of(kv_bits)

    def parts(self, kv_bits: int) -> list[SegmentPart]:
        return self._parts

    def _start(self, storage: KVCacheConfig) -> ExecutorchState:
        return ExecutorchState(self, storage, self._swap, self._rotation)

    def _free(self, state: ExecutorchState) -> None:
        self._swap.remove(state)

    def _close(self) -> None:
        self._swap = KVCacheSwap([])
        self._program.close()

    def _forward(self, states: Sequence[ExecutorchState], chunks: Sequence[Chunk]) -> list[Logits]:
        return [self._run(state, chunk) for state, chunk in zip(states, chunks, strict=True)]

    def _run(self, state: ExecutorchState, chunk: Chunk) -> Logits:
        self._swap.activate(state)
        logits, fed = [self._no_logits()], 0
        for tokens, num_logits in self._calls(chunk):
            count = len(tokens)
            # A program always computes at least one row of logits; drop it if it was not requested.
            rows = range(count - max(num_logits, 1), count)
            computed, *hidden = self._program.append(tokens, state.length, rows, chunk.exit_layer)
            if chunk.features is not None:
                by_layer = dict(zip(self._program.features, hidden, strict=True))
                parts = [by_layer[layer] for layer in self.capabilities.feature_layers]
                np.concatenate(parts, axis=1, out=chunk.features[fed : fed + count])
            fed += count
            state.held.append(count, all_layers=chunk.exit_layer is None)
            logits.append(computed[len(computed) - num_logits :])
        return np.concatenate(logits)

    def _calls(self, chunk: Chunk) -> Iterator[tuple[Sequence[int], int]]:
        """Cut a chunk into calls (tokens, number of logits) that fit the program's rows of logits."""
        tokens, num_logits, most = chunk.tokens, chunk.num_logits, self._program.rows
        if self._exact:
            for index, token in enumerate(tokens):
                yield [token], int(index >= len(tokens) - num_logits)
            return
        stop = len(tokens) - num_logits + min(num_logits, most)
        yield tokens[:stop], min(num_logits, most)
        for start in range(stop, len(tokens), most):
            piece = tokens[start : start + most]
            yield piece, len(piece)


def _notes(plan: Plan, asked: int) -> tuple[str, ...]:
    threads = pool_threads()
    if threads == plan.threads:
        return ()
    why = (
        "this machine has no more cores" if threads == asked else "the first program of this process fixed that number"
    )
    return (f"computes with {threads} threads where {plan.threads} were planned: {why}",)


def _check_agrees(path: Path, program: LoadedProgram, plan: Plan) -> None:
    """Raise an error unless the program is the one that the plan describes."""
    sizes = Sizes.of(plan)
    if program.slots < sizes.slots:
        raise InvalidInput(
            f"{path}: holds {program.slots} tokens and {sizes.slots} were asked for; "
            f"ask for at most {program.slots}, or export with that context"
        )
    if missing := set(plan.exits) - set(program.exits):
        raise DamagedArtifact(f"{path}: has no exit after layers {sorted(missing)}, as its plan says; export it again")
    if feature_layers(plan) != program.features:
        raise DamagedArtifact(
            f"{path}: gives hidden states after layers {list(program.features)}, its plan asks for "
            f"{list(feature_layers(plan))}; export it again"
        )
    stated = (program.layers, program.vocabulary)
    planned = (len(plan.model.layers), plan.model.vocab_size)
    if stated != planned:
        raise DamagedArtifact(
            f"{path}: has {stated[0]} layers and {stated[1]} tokens, its plan says {planned[0]} and {planned[1]}; "
            "export it again"
        )
