"""The engine: states as rows of slabs, chunks as runs of rows, and the rule that makes a row's result exact.

Knows nothing of sampling, speculation or windows: it appends tokens, and forgets them when it is told to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekit.cache import Storage
from edgekit.errors import InvalidInput, Unsupported, clip
from edgekit.facts import read_fact, write_fact
from edgekit.holding import check_chunk, check_storage
from edgekit.interfaces import Abilities, Chunk, Segment
from edgekit.memory import layers_bytes
from edgekit.plan import Plan
from edgekit.rotation import Rotation
from edgekit.segments import Part, read_key_values
from edgekit_onnx.adapters import Adapters
from edgekit_onnx.bodies import Bodies, Form
from edgekit_onnx.drafted import Drafted
from edgekit_onnx.exactness import (
    INEXACT_CACHE,
    NOT_HERE,
    can_be_exact,
    holds_here,
    padded_tokens,
    spare_rows,
    works_in_pairs,
)
from edgekit_onnx.loading import Loaded, load
from edgekit_onnx.narrow import BITS as NARROW_BITS
from edgekit_onnx.narrow import read_steps
from edgekit_onnx.offers import KEPT_TOKENS, RETURNED_BYTES
from edgekit_onnx.parts import SPARE_TOKENS, parts_of
from edgekit_onnx.rows import Rows
from edgekit_onnx.runner import Runner
from edgekit_onnx.sessions import PROVIDERS, SPINNING, Provider, threads_spin, version
from edgekit_onnx.slab import LayerShape, row_bytes
from edgekit_onnx.state import OnnxState

if TYPE_CHECKING:
    from edgekit.interfaces import Logits


class OnnxEngine:
    """One artifact, opened."""

    def __init__(
        self, plan: Plan, files: Path, *, exact: bool = False, provider: Provider | None = None, packs: bool = True
    ) -> None:
        """`provider` other than the plan's backend is for checks: what was written for CUDA, run by the CPU.

        Without `packs`, nothing is copied and nothing is quick.
        """
        self.plan, self._exact = plan, exact
        if exact and not can_be_exact(plan):
            raise Unsupported(INEXACT_CACHE)
        self._layers = tuple(LayerShape(layer.kv_heads, layer.head_dim) for layer in plan.model.layers)
        self._pairs = works_in_pairs(plan.model, plan.recipe)
        self._rotation = Rotation(plan.model, plan.context)
        self._loaded: Loaded = load(plan, files, provider or PROVIDERS[plan.backend], packs=packs)
        self.notes = tuple(note for note in (self._loaded.note, SPINNING if threads_spin() else "") if note)
        self._steps = read_steps(files, plan.model) if plan.backend == "cpu" else None
        self._bodies = Bodies(self._loaded.graphs, self._steps)
        wide = 32 if plan.storage.kv_bits == NARROW_BITS else plan.storage.kv_bits
        kv_bits = (wide, NARROW_BITS) if self._steps else (wide,)
        self._model_key = hashlib.sha256(f"{self._loaded.key} {self._layers} {_dtype(wide)}".encode()).hexdigest()
        self._runner = Runner(
            self._loaded,
            hidden_size=plan.model.hidden_size,
            vocabulary=plan.model.vocab_size,
            tokens=max(plan.chunk_tokens, plan.sequences) + SPARE_TOKENS,
            states=plan.sequences,
        )
        self._slabs: dict[Storage, Rows] = {}
        self._adapters = Adapters(plan, self._loaded)
        self._is_closed = False
        self._fed_sizes: set[int] = set()  # tokens of calls since the arena was given back
        self.abilities = Abilities(
            vocabulary=plan.model.vocab_size,
            max_states=plan.sequences,
            max_chunk_tokens=plan.chunk_tokens,
            kv_bits=kv_bits,
            exits=tuple(part.stop for part in parts_of(plan)[:-1]),
            adapters=plan.adapter_rank > 0,
            exact="on_request" if can_be_exact(plan) else "never",
        )
        self._exact_bits: set[int] = set()
        self._planned_bits = plan.storage.kv_bits if plan.storage.kv_bits in kv_bits else wide

    def start(self, storage: Storage) -> OnnxState:
        check_storage(storage, self.abilities, self.plan.storage, "onnx")
        if self._is_closed:
            raise InvalidInput("the engine is closed")
        if sum(len(rows.states) for rows in self._slabs.values()) >= self.abilities.max_states:
            raise InvalidInput(
                f"all {self.abilities.max_states} states are in use; close one, or export with more sequences"
            )
        if self._exact and storage.kv_bits not in self._exact_bits:
            self._check_exactness(storage)
        return self._rows(storage).start(storage)

    def state_bytes(self, storage: Storage) -> int:
        check_storage(storage, self.abilities, self.plan.storage, "onnx")
        self._adapters.find(storage.adapter)
        return row_bytes(self._layers, self._held(storage), _dtype(storage.kv_bits).itemsize)

    def forward(self, chunks: Sequence[Chunk]) -> list[Logits]:
        try:
            states = [self._check(chunk) for chunk in chunks]
            if len({id(state) for state in states}) < len(states):
                raise InvalidInput("a state stands twice in one forward; feed its tokens in one chunk")
            found: list[Logits] = [np.empty((0, self.abilities.vocabulary), np.float32) for _ in chunks]
            for run in self._runs(chunks, states):
                for index, logits in self._run(chunks, states, run):
                    found[index] = logits
        except BaseException:
            for chunk in chunks:
                chunk.state.close()
            raise
        return found

    def read_segment(self, path: Path) -> Segment:
        forms = {
            kind.name: [Part(layer.kv_heads, layer.head_dim, kind) for layer in self._layers for _ in ("key", "value")]
            for kind in map(_dtype, self.abilities.kv_bits)
        }
        models = [self._key_of(name) for name in (None, *self._adapters.names)]
        return read_key_values(path, models, forms, self.plan.storage.capacity_tokens)

    def load_adapter(self, name: str, files: Path) -> int:
        if self._is_closed:
            raise InvalidInput("the engine is closed")
        loaded = self._adapters.load(name, files)
        narrow = {rows.running.form.is_narrow for rows in self._slabs.values()} or {self._planned_bits == NARROW_BITS}
        for is_narrow in narrow:
            self._bodies.sessions(Form(is_narrow, loaded.sites))
        if self._exact and not self._is_exact_with(name):
            self.drop_adapter(name)
            raise Unsupported(f"adapter {clip(name)}: {NOT_HERE}")
        return loaded.bytes

    def drop_adapter(self, name: str) -> None:
        self._adapters.find(name)
        mine = [storage for storage in self._slabs if storage.adapter == name]
        if any(self._slabs[storage].states for storage in mine):
            raise InvalidInput(f"adapter {clip(name)} is in use; close its states first")
        for storage in mine:
            self._close_slab(storage)
        self._adapters.drop(name)
        self._drop_forms()

    def close(self) -> None:
        self._is_closed = True
        for storage in list(self._slabs):
            self._close_slab(storage)
        self._adapters.close()
        self._bodies.close()
        self._runner.close()
        self._loaded = self._loaded._replace(head=None)

    def _rows(self, storage: Storage) -> Rows:
        """The states that are held like that; a slab for them where there is none yet."""
        if storage not in self._slabs:
            kind, key = _dtype(storage.kv_bits), self._key_of(storage.adapter)
            running = self._bodies.running(storage.kv_bits, self._adapters.find(storage.adapter))
            slab = self._loaded.slab(self._layers, self.abilities.max_states, self._held(storage), kind)
            self._slabs[storage] = Rows(slab, running, self._rotation, key, self.state_bytes(storage))
            self._drop_forms()
        return self._slabs[storage]

    def _drop_forms(self) -> None:
        """Sessions that no state can come to need: of a width that nobody holds, of an adapter that is gone."""
        held = {rows.running.form.is_narrow for rows in self._slabs.values()}
        sites = {frozenset(), *self._adapters.sites}
        self._bodies.drop(
            lambda form: (bool(held) and form.is_narrow not in held) or form.sites not in sites,
        )

    def _close_slab(self, storage: Storage) -> None:
        rows = self._slabs.pop(storage)
        for state in list(rows.states):
            state.close()
        self._runner.forget(rows.slab)
        rows.slab.close()

    def _key_of(self, adapter: str | None) -> str:
        """What saved keys and values are known by: the model's bytes and the adapter's."""
        found = self._adapters.find(adapter)
        if found is None:
            return self._model_key
        return hashlib.sha256(f"{self._model_key} {found.sha256}".encode()).hexdigest()

    def _is_exact_with(self, adapter: str) -> bool:
        storage = self.plan.storage.model_copy(update={"adapter": adapter, "kv_bits": self._planned_bits})
        return holds_here(self, storage, self._rows(storage).start)

    def _check_exactness(self, storage: Storage) -> None:
        """Once a machine, artifact and width; what cannot hold is refused, not hoped for."""
        plain = storage.model_copy(update={"adapter": None})
        fact = {"holds": True, "onnxruntime": version(), "threads": self.plan.threads}
        name = "exact" if plain.kv_bits == 32 else f"exact-{plain.kv_bits}"
        if read_fact(self._model_key, name) != fact:
            if not holds_here(self, plain, self._rows(plain).start):
                self.close()
                raise Unsupported(NOT_HERE)
            write_fact(self._model_key, name, fact)
        self._exact_bits.add(plain.kv_bits)

    def _held(self, storage: Storage) -> int:
        """Tokens that a row of the slab holds: in exact mode a token is fed beside a lone one."""
        return storage.capacity_tokens + (SPARE_TOKENS if self._exact else 0)

    def _check(self, chunk: Chunk) -> OnnxState:
        state = chunk.state
        if not isinstance(state, OnnxState) or not state.held.is_open or state not in self._states():
            raise InvalidInput("the state is closed, or of another engine")
        check_chunk(chunk, state.held, self.abilities)
        return state

    def _states(self) -> list[OnnxState]:
        return [state for rows in self._slabs.values() for state in rows.states]

    def _runs(self, chunks: Sequence[Chunk], states: Sequence[OnnxState]) -> Iterator[list[int]]:
        """Chunks that can be one call: single tokens for neighbouring rows of one slab. All others run alone."""
        order = sorted(range(len(chunks)), key=lambda index: (id(states[index].slab), states[index].row))
        run: list[int] = []
        for index in order:
            if run and not (self._batches(chunks[run[-1]], chunks[index]) and states[run[-1]].is_before(states[index])):
                yield run
                run = []
            run.append(index)
        if run:
            yield run

    def _batches(self, one: Chunk, other: Chunk) -> bool:
        return not self._exact and len(one.tokens) == len(other.tokens) == 1 and one.exit == other.exit

    def _run(
        self, chunks: Sequence[Chunk], states: Sequence[OnnxState], run: list[int]
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        first, exit_ = states[run[0]], chunks[run[0]].exit
        ids = np.array([chunks[index].tokens for index in run], np.int64)
        tokens = ids.shape[1]
        if self._exact:
            ids = np.pad(ids, ((0, 0), (0, padded_tokens(tokens, self._pairs) - tokens)), mode="edge")
        lengths = [states[index].length + ids.shape[1] for index in run]
        if len(run) > 1 or not self._verify(first, chunks[run[0]], ids):
            gives_back = len(run) == 1 and self._gives_back(chunks[run[0]])
            layers = exit_ or len(self._layers)
            self._runner.body(first.running, first.slab, first.row, ids, lengths, layers, gives_back=gives_back)
        if exit_ is not None:
            self._keep(chunks, states, run, exit_)
        for index in run:
            states[index].fed(tokens, all_layers=exit_ is None)
        if len(run) == 1:
            rows = chunks[run[0]].rows
            if rows:
                start, stop = spare_rows(tokens, rows, ids.shape[1]) if self._exact else (tokens - rows, tokens)
                logits = self._runner.logits(start, stop)
                yield run[0], logits[tokens - rows - start : tokens - start]
        elif any(chunks[index].rows for index in run):
            logits = self._runner.logits(0, len(run))
            for place, index in enumerate(run):
                yield index, logits[place : place + chunks[index].rows]

    def _gives_back(self, chunk: Chunk) -> bool:
        """Whether the arena goes back with this call: it keeps pieces of every size that was fed."""
        self._fed_sizes.add(len(chunk.tokens))
        total = sum(self._fed_sizes)
        if not chunk.rows or total <= KEPT_TOKENS:
            return False
        if layers_bytes(self.plan.model, total, self.plan.memory) < RETURNED_BYTES:
            return False
        self._fed_sizes.clear()
        return True

    def _keep(self, chunks: Sequence[Chunk], states: Sequence[OnnxState], run: list[int], exit_: int) -> None:
        """Remember what the first layers said, for when the same tokens are verified."""
        if self._loaded.on_device:
            return
        hidden = self._runner.hidden(states[run[0]].running, exit_)
        for place, index in enumerate(run):
            state, tokens = states[index], chunks[index].tokens
            drafted = state.drafted
            if drafted is None or drafted.exit != exit_ or not drafted.start <= state.length <= drafted.stop:
                drafted = state.drafted = Drafted(exit_, state.length)
            drafted.cut(state.length)
            drafted.add(tokens, hidden[place:] if len(run) > 1 else hidden)

    def _verify(self, state: OnnxState, chunk: Chunk, ids: NDArray[np.int64]) -> bool:
        """Run only what an early exit has not said of these tokens yet; whether that was possible."""
        drafted, fed = state.drafted, ids.shape[1]
        if chunk.exit is not None or drafted is None or drafted.start != state.length:
            return False
        known = drafted.shared(chunk.tokens)
        if known == 0:
            return False
        running = state.running
        hidden = self._runner.hidden(running, drafted.exit)
        rest = ids[:, known:]
        if rest.size and known < len(chunk.tokens):
            count = padded_tokens(rest.shape[1], self._pairs) if self._exact else rest.shape[1]
            rest = np.pad(rest, ((0, 0), (0, count - rest.shape[1])), mode="edge")
            lengths = [state.length + known + count]
            self._runner.body(running, state.slab, state.row, rest, lengths, drafted.exit)
            hidden[known:fed] = hidden[: fed - known].copy()
        drafted.put(hidden, known)
        hidden[len(chunk.tokens) : fed] = hidden[len(chunk.tokens) - 1]
        lengths = [state.length + fed]
        self._runner.body(running, state.slab, state.row, ids, lengths, len(self._layers), start=drafted.exit)
        return True


def _dtype(kv_bits: int) -> np.dtype[Any]:
    """What one number of the cache is."""
    return np.dtype({8: np.int8, 16: np.float16}.get(kv_bits, np.float32))
