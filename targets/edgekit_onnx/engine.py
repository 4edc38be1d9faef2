"""The engine: states in slots of KV arenas, batches of decoding states, and the padding of exact mode."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import LEAST_SCORED_BITS, KVCacheConfig
from edgekit.contracts.plan import Plan
from edgekit.contracts.recurrent import recurrent_shapes
from edgekit.enginekit.base import EngineBase
from edgekit.enginekit.exactness import check_once, holds_here
from edgekit.enginekit.keeping import ATTENTION, CACHE, scorers_for
from edgekit.enginekit.kv_segment import SegmentPart
from edgekit.enginekit.rope_shift import Rotation
from edgekit.enginekit.spinning import SPINNING, spins_long
from edgekit.errors import Unsupported, quote_short
from edgekit.model.lora import LoraAdapter
from edgekit_onnx.adapters import OnnxAdapter, bind_adapter
from edgekit_onnx.attention_reader import AttentionReader
from edgekit_onnx.capabilities import capabilities
from edgekit_onnx.early_exit_cache import EarlyExitCache
from edgekit_onnx.embedding_rows import EmbeddingRows, FinalNorm
from edgekit_onnx.exactness import (
    NOT_HERE,
    check_exact_bits,
    feeds_single_tokens,
    has_wide_heads,
    inexact,
    padded_tokens,
    spare_rows,
)
from edgekit_onnx.float16_kv import BITS as HALF_BITS, with_halves
from edgekit_onnx.int8_kv import BITS as INT8_BITS, read_steps, with_steps
from edgekit_onnx.kv_arena import LayerShape
from edgekit_onnx.layout import SPARE_TOKENS
from edgekit_onnx.loading import AuditedArtifact, load
from edgekit_onnx.memory import ARRAYS, KEPT_TOKENS, RETURNED_BYTES
from edgekit_onnx.product_kernels import VERSION
from edgekit_onnx.runner import BodyCall, Runner
from edgekit_onnx.session_variants import SessionVariants, Variant
from edgekit_onnx.sessions import PROVIDERS, Provider, arithmetic
from edgekit_onnx.slot_table import SlotTable
from edgekit_onnx.state import OnnxState

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits


class OnnxEngine(EngineBase[OnnxState, OnnxAdapter]):
    """One artifact, opened with onnxruntime."""

    target = "onnx"

    def __init__(
        self, plan: Plan, files: Path, *, exact: bool = False, provider: Provider | None = None, packs: bool = True
    ) -> None:
        """Audit the artifact and open its sessions.

        `provider` replaces the provider of the plan's backend, for example to check a graph for CUDA on the CPU.
        Without `packs`, weights are used straight from the file: no copy is made, and products are slow.
        """
        super().__init__(plan)
        self._layers = tuple(
            LayerShape(layer.kv_heads if layer.stores_kv else 0, layer.head_dim) for layer in plan.model.layers
        )
        self._rotation = Rotation(plan.model, plan.context)
        # Only a plan whose window scores tokens by attention pays for sessions that return attention.
        able = capabilities(plan.model, plan.recipe, plan.backend)
        attending = tuple(name for name in scorers_for(ATTENTION) if name in able.scorers)
        self._attends = plan.cache.keep in attending
        self._loaded: AuditedArtifact = load(plan, files, provider or PROVIDERS[plan.backend], packs=packs)
        is_always = self._loaded.rows_are_alone and not plan.adapter_rank  # whose products are onnxruntime's
        if exact and not is_always and (reason := inexact(plan)):
            raise Unsupported(reason)
        self._exact, self._follows_rule = exact, exact and not is_always
        self._one_by_one = self._follows_rule and feeds_single_tokens(plan)
        self._pads = self._follows_rule and not self._one_by_one
        notes = (self._loaded.note, SPINNING if spins_long() else "")
        self.notes = tuple(note for note in notes if note)
        self._steps = steps = read_steps(files, plan.model) if plan.backend == "cpu" else None
        by_width = {HALF_BITS: with_halves, INT8_BITS: with_steps} if plan.backend == "cpu" else {}
        self._variants = SessionVariants(self._loaded.graphs, by_width, steps)
        float_bits = HALF_BITS if plan.storage.kv_bits == HALF_BITS else 32
        narrower = [bits for bits in by_width if bits < float_bits and (bits != INT8_BITS or steps)]
        kv_bits = (float_bits, *narrower)
        # Do not derive this text from the code's names: saved prefixes contain its hash.
        shapes = ", ".join(f"LayerShape(kv_heads={heads}, head_dim={dim})" for heads, dim in self._layers)
        shapes += "," if len(self._layers) == 1 else ""
        identity = f"{self._loaded.key} ({shapes}) {_dtype(float_bits)}"
        identity += f" {VERSION}" if self._loaded.graphs.kernels else ""
        self._model_key = hashlib.sha256(identity.encode()).hexdigest()
        self._runner = Runner(
            self._loaded,
            plan.model,
            tokens=max(plan.chunk_tokens, plan.sequences) + SPARE_TOKENS,
            states=plan.sequences,
            hidden_layers=plan.drafter.hidden_layers if plan.drafter is not None else (),
        )
        self._tables: dict[KVCacheConfig, SlotTable] = {}
        self._fed_sizes: set[int] = set()  # chunk sizes since the arena of activations was last shrunk
        self.capabilities = able.narrowed(
            plan,
            kv_bits=kv_bits,
            scorers=(*scorers_for(CACHE), *(attending if self._attends else ())),
            scorers_on_request=() if self._attends else attending,
            kv_layers=() if self._loaded.on_device else able.kv_layers,
            hidden_size=None if self._loaded.on_device else able.hidden_size,
            copied_share=self._loaded.copied_share * (1 + self._attends),
            exact="always" if is_always else "never" if inexact(plan) else able.exact,
        )
        self._files = files
        self._final_norm: FinalNorm | None = None  # read when hidden states are first requested
        self._embedding: EmbeddingRows | None = None  # opened when embeddings are first requested
        self._exact_bits: set[int] = set()  # cache widths for which exactness was checked
        self._planned_bits = plan.storage.kv_bits if plan.storage.kv_bits in kv_bits else float_bits

    @property
    def model_key(self) -> str:
        return self._model_key

    @property
    def products(self) -> str:
        """What computes the products of packed weights: onnxruntime's operators, or edgekit's and their path."""
        kernels = self._loaded.graphs.kernels
        return f"edgekit, {kernels.path}" if kernels else "onnxruntime"

    def form(self, kv_bits: int) -> str:
        return _dtype(kv_bits).name

    def parts(self, kv_bits: int) -> list[SegmentPart]:
        kind = _dtype(kv_bits)
        layers = [layer for layer in self._layers if layer.kv_heads]
        return [SegmentPart(layer.kv_heads, layer.head_dim, kind) for layer in layers for _ in ("key", "value")]

    def _check_adapter(self, name: str) -> None:
        """Open the adapter's sessions. In exact mode, check that results with it are exact too."""
        self._open_sessions(self.adapters[name])
        bits = INT8_BITS if self._exact and has_wide_heads(self.plan) else self._planned_bits
        storage = self.plan.storage.model_copy(update={"adapter": name, "kv_bits": bits})
        if self._exact and not holds_here(self, storage, self._admit):
            raise Unsupported(f"adapter {quote_short(name)}: {NOT_HERE}")

    def _before_start(self, storage: KVCacheConfig) -> None:
        if self._exact:
            if self._follows_rule:
                check_exact_bits(self.plan, storage.kv_bits)
            if storage.kv_bits not in self._exact_bits:
                self._check_exactness(storage)

    def _start(self, storage: KVCacheConfig) -> OnnxState:
        return OnnxState(self, storage, self._table(storage))

    def _embedded(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        if self._embedding is None:
            self._embedding = EmbeddingRows(self.plan, self._files, PROVIDERS[self.plan.backend])
        return self._embedding(tokens)

    def _free(self, state: OnnxState) -> None:
        state.table.free(state)

    def _forward(self, states: Sequence[OnnxState], chunks: Sequence[Chunk]) -> list[Logits]:
        logits = [self._no_logits() for _ in chunks]
        for batch in self._batches(states, chunks):
            if self._one_by_one and len(chunks[batch[0]].tokens) > 1:
                logits[batch[0]] = self._token_by_token(states[batch[0]], chunks[batch[0]])
                continue
            for index, rows in self._run(states, chunks, batch):
                logits[index] = rows
        return logits

    def _token_by_token(self, state: OnnxState, chunk: Chunk) -> Logits:
        first, found = len(chunk.tokens) - chunk.num_logits, [self._no_logits()]
        for index, token in enumerate(chunk.tokens):
            features = None if chunk.features is None else chunk.features[index : index + 1]
            one = chunk._replace(tokens=[token], num_logits=int(index >= first), features=features)
            found += [rows for _, rows in self._run([state], [one], [0])]
        return np.concatenate(found[1:] or found)

    def _load_adapter(self, name: str, adapter: LoraAdapter) -> OnnxAdapter:
        known = {other.sites for other in self.adapters.values()}
        return bind_adapter(self.plan.model, self._loaded, adapter, known, variants=1 + self._attends)

    def _drop_adapter(self, name: str) -> None:
        for storage in [storage for storage in self._tables if storage.adapter == name]:
            self._close_table(storage)
        self._drop_sessions()

    def interrupt(self) -> None:
        """End a running call before its next operator."""
        super().interrupt()
        self._runner.interrupt()

    def _close(self) -> None:
        for storage in list(self._tables):
            self._close_table(storage)
        self._variants.close()
        self._runner.close()
        self._embedding = None
        self._loaded = self._loaded._replace(head=None)

    def _slots(self, storage: KVCacheConfig) -> int:
        # Exact mode feeds padding after the real tokens.
        return storage.capacity_tokens + (SPARE_TOKENS if self._follows_rule else 0)

    def _table(self, storage: KVCacheConfig) -> SlotTable:
        """Return the slot table for this configuration, which the first state allocates."""
        if storage not in self._tables:
            running = self._variants.running(storage.kv_bits, self.find_adapter(storage.adapter))
            arena = self._loaded.kv_arena(
                self._layers, self.capabilities.max_states, self._slots(storage), _dtype(storage.kv_bits),
                recurrent_shapes(self.plan.model),
            )  # fmt: skip
            steps = self._steps if storage.kv_bits == INT8_BITS else None
            self._tables[storage] = SlotTable(arena, running, self._rotation, self._attention_reader(storage), steps)
            self._drop_sessions()
        return self._tables[storage]

    def _attention_reader(self, storage: KVCacheConfig) -> AttentionReader | None:
        if not self._attends or storage.kv_bits < LEAST_SCORED_BITS:
            return None
        chunk = 1 if self._one_by_one else max(2, self.plan.chunk_tokens // 2 * 2)
        adapter = self.find_adapter(storage.adapter)
        return AttentionReader(
            self._runner, self._variants.running(storage.kv_bits, adapter, attends=True),
            heads=self.plan.model.heads, layers=len(self._layers), chunk_tokens=chunk,
        )  # fmt: skip

    def _close_table(self, storage: KVCacheConfig) -> None:
        table = self._tables.pop(storage)
        self._runner.forget(table.arena)
        table.arena.close()

    def _open_sessions(self, adapter: OnnxAdapter) -> None:
        widths = {table.running.variant.kv_bits for table in self._tables.values()}
        for kv_bits in widths or {self._planned_bits}:
            self._variants.sessions(Variant(kv_bits, adapter.sites))

    def _drop_sessions(self) -> None:
        """Close sessions that no state can use: of a cache width without a table, or of a dropped adapter."""
        widths = {table.running.variant.kv_bits for table in self._tables.values()}
        sites = {frozenset(), *(adapter.sites for adapter in self.adapters.values())}
        self._variants.drop(
            lambda variant: (bool(widths) and variant.kv_bits not in widths) or variant.sites not in sites
        )

    def _check_exactness(self, storage: KVCacheConfig) -> None:
        """Check exactness once for each machine, artifact and cache width. If it fails, close the engine and refuse."""
        plain = storage.model_copy(update={"adapter": None})
        check_once(
            self, plain, self._admit, key=self._model_key,
            name="exact" if plain.kv_bits == 32 else f"exact-{plain.kv_bits}",
            versions={"onnxruntime": arithmetic(self._loaded.graphs.kernels), "threads": self.plan.threads},
            refusal=NOT_HERE,
        )  # fmt: skip
        self._exact_bits.add(plain.kv_bits)

    def _batches(self, states: Sequence[OnnxState], chunks: Sequence[Chunk]) -> Iterator[list[int]]:
        """Yield indices of chunks for one call: single tokens of neighbouring slots; any other chunk runs alone."""
        order = sorted(range(len(chunks)), key=lambda index: (id(states[index].arena), states[index].slot))
        batch: list[int] = []
        for index in order:
            if batch:
                last = batch[-1]
                neighbours = states[last].is_before(states[index]) and states[last].kept == states[index].kept
                if not (neighbours and self._can_join(chunks[last], chunks[index])):
                    yield batch
                    batch = []
            batch.append(index)
        if batch:
            yield batch

    def _can_join(self, one: Chunk, other: Chunk) -> bool:
        alike = one.exit_layer == other.exit_layer and one.hidden == other.hidden
        return not self._follows_rule and len(one.tokens) == len(other.tokens) == 1 and alike

    def _run(
        self, states: Sequence[OnnxState], chunks: Sequence[Chunk], batch: list[int]
    ) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Make one call; yield the index and the logits of each chunk that requests logits."""
        first, first_chunk = states[batch[0]], chunks[batch[0]]
        exit_layer = first_chunk.exit_layer
        ids = np.array([chunks[index].tokens for index in batch], np.int64)
        tokens = ids.shape[1]
        if self._pads:
            ids = np.pad(ids, ((0, 0), (0, padded_tokens(tokens) - tokens)), mode="edge")
        lengths = [states[index].length + ids.shape[1] for index in batch]
        asks = any(chunks[index].features is not None for index in batch)
        alone = len(batch) > 1 or asks or self._one_by_one
        if alone or not self._run_after_exit(first, chunks[batch[0]], ids):
            gives_back = len(batch) == 1 and self._gives_back(chunks[batch[0]])
            layers = exit_layer or len(self._layers)
            call = BodyCall(ids, lengths, layers, kept=first.kept, gives_back=gives_back, keeps_hidden=asks)
            self._runner.body(first.running, first.arena, first.slot, call)
        if asks:
            hidden = self._runner.hidden_states(len(batch) * tokens)
            for row, index in enumerate(batch):
                asked = chunks[index].features
                if asked is not None:
                    asked[:] = hidden[row * tokens : (row + 1) * tokens]
        if exit_layer is not None:
            self._keep_hidden(states, chunks, batch, exit_layer)
        for index in batch:
            states[index].append(tokens, all_layers=exit_layer is None)
        if len(batch) == 1:
            rows = chunks[batch[0]].num_logits
            if rows:
                start, stop = spare_rows(tokens, rows, ids.shape[1]) if self._pads else (tokens - rows, tokens)
                found = self._rows(chunks[batch[0]], start, stop)
                yield batch[0], found[tokens - rows - start : tokens - start]
        elif any(chunks[index].num_logits for index in batch):
            found = self._rows(first_chunk, 0, len(batch))
            for row, index in enumerate(batch):
                yield index, found[row : row + chunks[index].num_logits]

    def _rows(self, chunk: Chunk, start: int, stop: int) -> NDArray[np.float32]:
        """Return logits, or normalised hidden states, of the tokens `start` to `stop` of the last call."""
        if not chunk.hidden:
            return self._runner.logits(start, stop)
        if self._final_norm is None:
            self._final_norm = FinalNorm(self.plan, self._files)
        return self._final_norm(self._runner.last_hidden(start, stop))

    def _gives_back(self, chunk: Chunk) -> bool:
        """Return True if this call should shrink the arena of activations, which keeps memory for every size so far."""
        self._fed_sizes.add(len(chunk.tokens))
        total = sum(self._fed_sizes)
        if not chunk.num_logits or total <= KEPT_TOKENS:
            return False
        if ARRAYS.layers_bytes(self.plan.model, total) < RETURNED_BYTES:
            return False
        self._fed_sizes.clear()
        return True

    def _keep_hidden(
        self, states: Sequence[OnnxState], chunks: Sequence[Chunk], batch: list[int], exit_layer: int
    ) -> None:
        """Keep the hidden states of an early exit, so that verifying the same tokens skips those layers."""
        if self._loaded.on_device:
            return
        hidden = self._runner.hidden(states[batch[0]].running, exit_layer)
        for row, index in enumerate(batch):
            state, tokens = states[index], chunks[index].tokens
            drafted = state.drafted
            if drafted is None or drafted.exit != exit_layer or not drafted.start <= state.length <= drafted.stop:
                drafted = state.drafted = EarlyExitCache(exit_layer, state.length)
            drafted.cut(state.length)
            drafted.add(tokens, hidden[row:] if len(batch) > 1 else hidden)

    def _run_after_exit(self, state: OnnxState, chunk: Chunk, ids: NDArray[np.int64]) -> bool:
        """Continue from an early exit of the same tokens with the later layers only; return False if there was none."""
        drafted, fed = state.drafted, ids.shape[1]
        if chunk.exit_layer is not None or drafted is None or drafted.start != state.length:
            return False
        known = drafted.shared(chunk.tokens)
        if known == 0:
            return False
        running = state.running
        hidden = self._runner.hidden(running, drafted.exit)
        rest = ids[:, known:]
        if rest.size and known < len(chunk.tokens):
            count = padded_tokens(rest.shape[1]) if self._pads else rest.shape[1]
            rest = np.pad(rest, ((0, 0), (0, count - rest.shape[1])), mode="edge")
            lengths = [state.length + known + count]
            self._runner.body(running, state.arena, state.slot, BodyCall(rest, lengths, drafted.exit))
            hidden[known:fed] = hidden[: fed - known].copy()
        drafted.put(hidden, known)
        hidden[len(chunk.tokens) : fed] = hidden[len(chunk.tokens) - 1]
        lengths = [state.length + fed]
        after = BodyCall(ids, lengths, len(self._layers), start=drafted.exit)
        self._runner.body(running, state.arena, state.slot, after)
        return True


def _dtype(kv_bits: int) -> np.dtype[Any]:
    """Return the number type of a cache width."""
    return np.dtype({8: np.int8, 16: np.float16}.get(kv_bits, np.float32))
