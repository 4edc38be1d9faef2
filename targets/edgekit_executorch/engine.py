"""The engine on a desktop: a phone's own program, run by ExecuTorch's Python runtime.

One cache, many states: see `seats`. In exact mode every token is a call of its own, so that a row cannot depend on how
its text was cut. Knows nothing of ExecuTorch's calls, which `program` makes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgekit.artifact import MANIFEST
from edgekit.cache import Storage
from edgekit.errors import DamagedArtifact, InvalidInput, Unsupported, clip
from edgekit.files import file_sha256
from edgekit.holding import check_chunk, check_storage
from edgekit.interfaces import Abilities, Chunk, Segment
from edgekit.plan import Plan
from edgekit.rotation import Rotation
from edgekit.segments import read_key_values
from edgekit_executorch.layout import PROGRAM, Sizes
from edgekit_executorch.narrow import form_of, parts_of
from edgekit_executorch.program import LoadedProgram, pool_threads
from edgekit_executorch.seats import Seats
from edgekit_executorch.state import ExecutorchState

if TYPE_CHECKING:
    from edgekit.interfaces import Logits


class ExecutorchEngine:
    """One artifact, opened."""

    def __init__(self, plan: Plan, files: Path, *, exact: bool = False) -> None:
        self.plan, self._exact = plan, exact
        path = files / PROGRAM
        # A phone's plan counts the phone's cores.
        wanted = min(plan.threads, os.cpu_count() or 1)
        self._program: LoadedProgram | None = LoadedProgram(path, wanted)
        _check_agrees(path, self._program, plan)
        bits = self._program.kv_bits
        self._form = form_of(bits)
        self._parts = [part for layer in plan.model.layers for _ in range(2) for part in parts_of(layer, bits)]
        self.notes = _notes(plan, wanted)
        self.seats = Seats(self._program.cache())
        self.rotation = Rotation(plan.model, plan.context)
        key = file_sha256(path) if not (files / MANIFEST).exists() else file_sha256(files / MANIFEST)
        self.model_key = hashlib.sha256(f"{key} {self._parts}".encode()).hexdigest()
        self._states: list[ExecutorchState] = []
        self.abilities = Abilities(
            vocabulary=plan.model.vocab_size,
            max_states=plan.sequences,
            max_chunk_tokens=min(plan.chunk_tokens, self._program.chunk),
            kv_bits=(bits,),
            exits=plan.exits,
            exact="on_request",
        )

    def start(self, storage: Storage) -> ExecutorchState:
        self._opened()
        check_storage(storage, self.abilities, self.plan.storage, "executorch")
        if len(self._states) >= self.abilities.max_states:
            raise InvalidInput(
                f"all {self.abilities.max_states} states are in use; close one, or export with more sequences"
            )
        state = ExecutorchState(self, storage)
        self.seats.admit(state)
        self._states.append(state)
        return state

    def state_bytes(self, storage: Storage) -> int:
        check_storage(storage, self.abilities, self.plan.storage, "executorch")
        return sum(part.token_bytes for part in self._parts) * storage.capacity_tokens

    def forward(self, chunks: Sequence[Chunk]) -> list[Logits]:
        try:
            program = self._opened()
            states = [self._check(chunk) for chunk in chunks]
            if len({id(state) for state in states}) < len(states):
                raise InvalidInput("a state stands twice in one forward; feed its tokens in one chunk")
            return [self._feed(program, state, chunk) for state, chunk in zip(states, chunks, strict=True)]
        except BaseException:
            for chunk in chunks:
                chunk.state.close()
            raise

    def read_segment(self, path: Path) -> Segment:
        return read_key_values(path, [self.model_key], {self._form: self._parts}, self.plan.storage.capacity_tokens)

    def load_adapter(self, name: str, files: Path) -> int:
        raise Unsupported(f"executorch: adapter {clip(name)}: merge it into the weights before quantising")

    def drop_adapter(self, name: str) -> None:
        raise InvalidInput(f"no adapter {clip(name)} is loaded")

    def leave(self, state: ExecutorchState) -> None:
        """A state was closed."""
        self._states.remove(state)
        self.seats.leave(state)

    def close(self) -> None:
        for state in list(self._states):
            state.close()
        if self._program is not None:
            self.seats = Seats([])
            self._program.close()
            self._program = None

    def _opened(self) -> LoadedProgram:
        if self._program is None:
            raise InvalidInput("the engine is closed")
        return self._program

    def _feed(self, program: LoadedProgram, state: ExecutorchState, chunk: Chunk) -> Logits:
        self.seats.seat(state)
        found = [np.empty((0, self.abilities.vocabulary), np.float32)]
        for tokens, rows in self._pieces(program, chunk):
            count = len(tokens)
            # A program always computes a row; one that nobody asked for is dropped.
            logits = program.forward(tokens, state.length, range(count - max(rows, 1), count), chunk.exit)
            state.held.fed(count, all_layers=chunk.exit is None)
            found.append(logits[len(logits) - rows :])
        return np.concatenate(found)

    def _pieces(self, program: LoadedProgram, chunk: Chunk) -> Iterator[tuple[Sequence[int], int]]:
        """A chunk as calls: each within the rows that a program computes at once, or one for each token."""
        tokens, rows = chunk.tokens, chunk.rows
        if self._exact:
            for index, token in enumerate(tokens):
                yield [token], int(index >= len(tokens) - rows)
            return
        stop = len(tokens) - rows + min(rows, program.rows)
        yield tokens[:stop], min(rows, program.rows)
        for start in range(stop, len(tokens), program.rows):
            piece = tokens[start : start + program.rows]
            yield piece, len(piece)

    def _check(self, chunk: Chunk) -> ExecutorchState:
        state = chunk.state
        if not isinstance(state, ExecutorchState) or not state.held.is_open or state.engine is not self:
            raise InvalidInput("the state is closed, or of another engine")
        check_chunk(chunk, state.held, self.abilities)
        return state


def _notes(plan: Plan, wanted: int) -> tuple[str, ...]:
    threads = pool_threads()
    if threads == plan.threads:
        return ()
    why = "this machine has no more cores" if threads == wanted else "this process began with so many"
    return (f"computes with {threads} threads where {plan.threads} were planned: {why}",)


def _check_agrees(path: Path, program: LoadedProgram, plan: Plan) -> None:
    """The program is the one that the plan describes."""
    sizes = Sizes.of(plan)
    if program.slots < sizes.slots:
        raise InvalidInput(
            f"{path}: holds {program.slots} tokens and {sizes.slots} were asked for; "
            f"ask for at most {program.slots}, or export with that context"
        )
    if missing := set(plan.exits) - set(program.exits):
        raise DamagedArtifact(f"{path}: has no exit after layers {sorted(missing)}, as its plan says; export it again")
    stated = (program.layers, program.vocabulary)
    planned = (len(plan.model.layers), plan.model.vocab_size)
    if stated != planned:
        raise DamagedArtifact(
            f"{path}: has {stated[0]} layers and {stated[1]} tokens, its plan says {planned[0]} and {planned[1]}; "
            "export it again"
        )
