"""The engine: one mapped model, a context for each cache width, and calls that respect llama.cpp's limits."""

from __future__ import annotations

import ctypes
import hashlib
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgekit.common.files import file_sha256
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig
from edgekit.contracts.manifest import MANIFEST
from edgekit.contracts.plan import Plan
from edgekit.enginekit.base import EngineBase
from edgekit.enginekit.busy_cores import ThreadChoice
from edgekit.enginekit.exactness import check_once, holds_here
from edgekit.enginekit.kv_segment import SegmentPart
from edgekit.enginekit.spinning import SPINNING, spins_long
from edgekit.errors import DamagedArtifact, Unsupported, quote_short
from edgekit.model.gguf_source import file_identity
from edgekit.model.lora import LoraAdapter
from edgekit.quant.neutral_gguf import architecture_of
from edgekit_llamacpp import library, structs
from edgekit_llamacpp.adapters import LlamaCppAdapter, load_adapter
from edgekit_llamacpp.capabilities import capabilities
from edgekit_llamacpp.context import CELLS, OUTPUTS, Context, ContextShape, Feed, StopFlag, outputs_of
from edgekit_llamacpp.devices import on_this_machine
from edgekit_llamacpp.exactness import EXACT_BITS, INEXACT_CACHE, LEAST_EXACT, NOT_HERE, SPARE_TOKENS, can_be_exact
from edgekit_llamacpp.kv_blob import KVLayout
from edgekit_llamacpp.layout import NO_TOKENIZER, WEIGHTS, check_as_is, check_file_once
from edgekit_llamacpp.state import LlamaCppState

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits
    from edgekit_llamacpp.library import Library


class _Piece(NamedTuple):
    """Consecutive tokens of a chunk that run in one call."""

    chunk: int  # index of the chunk in the scheduler's call
    tokens: Sequence[int]
    num_logits: int


class LlamaCppEngine(EngineBase[LlamaCppState, LlamaCppAdapter]):
    """One artifact, opened with llama.cpp."""

    target = "llamacpp"

    def __init__(self, plan: Plan, files: Path, *, exact: bool = False) -> None:
        super().__init__(plan)
        if exact and not can_be_exact(plan):
            raise Unsupported(INEXACT_CACHE)
        self._exact = exact
        self._library = library.load()
        plan, self._gpu, gpu_note = on_this_machine(self._library, plan)
        self.plan = plan
        as_it_is = files.is_file()  # the file of another tool
        manifest, path = files / MANIFEST, files if as_it_is else files / WEIGHTS
        sealed = file_sha256(manifest) if manifest.exists() else None
        has_tokenizer = check_as_is(plan, path) if as_it_is else check_file_once(plan, path, sealed)
        identity = file_identity(path) if as_it_is else sealed or file_sha256(path)
        self._runs_on = f" gpu_layers={plan.gpu_layers} {self._gpu.description}" if self._gpu else ""
        build = f"{identity} {self._library.version} exact={exact}{self._runs_on}"
        self._model_key = hashlib.sha256(build.encode()).hexdigest()
        self._choice = ThreadChoice(plan.threads)
        self._contexts: dict[tuple[int, int], Context] = {}  # by cache width and tokens of a sequence
        self._stop = StopFlag()
        self._model = self._load(path)
        # Frees the memory of an engine that is dropped without being closed.
        self._release = weakref.finalize(self, _free, self._library, self._contexts, self._model)
        self._release.atexit = False
        able = capabilities(plan.model, plan.recipe, plan.backend, plan.context)
        self.capabilities = able.narrowed(
            plan,
            kv_bits=tuple(bits for bits in able.kv_bits if bits in EXACT_BITS or not exact),
            threads=None if exact else plan.threads,  # exactness was checked with the plan's number
            exact=able.exact if can_be_exact(plan) else "never",
        )
        untold = "" if has_tokenizer else NO_TOKENIZER
        notes = (gpu_note, SPINNING if spins_long() else "", untold)
        self.notes = tuple(note for note in notes if note)
        self._exact_bits: set[int] = set()  # cache widths for which exactness was checked

    @property
    def model_key(self) -> str:
        return self._model_key

    def form(self, kv_bits: int) -> str:
        return {32: "float32", 16: "float16", 8: "q8_0", 4: "q4_0"}[kv_bits]

    def parts(self, kv_bits: int) -> list[SegmentPart]:
        return self._layout(kv_bits).parts()

    def _check_adapter(self, name: str) -> None:
        """In exact mode, check that results with the adapter are exact too."""
        if self._exact and not holds_here(self, self._like_others(name), self._admit):
            raise Unsupported(f"adapter {quote_short(name)}: {NOT_HERE}")

    def _before_start(self, storage: KVCacheConfig) -> None:
        if self._exact and storage.kv_bits not in self._exact_bits:
            self._check_exactness(storage.model_copy(update={"adapter": None}))

    def _start(self, storage: KVCacheConfig) -> LlamaCppState:
        return LlamaCppState(self, storage, self._context(storage), self._layout(storage.kv_bits))

    def _free(self, state: LlamaCppState) -> None:
        state.context.give_back(state.sequence)

    def _forward(self, states: Sequence[LlamaCppState], chunks: Sequence[Chunk]) -> list[Logits]:
        rows: list[list[Logits]] = [[] for _ in chunks]
        for call in self._calls(states, chunks):
            for piece, logits in zip(call, self._run(states, call), strict=True):
                rows[piece.chunk].append(logits)
        return [np.concatenate(each) if len(each) > 1 else each[0] for each in rows]

    def _load_adapter(self, name: str, adapter: LoraAdapter) -> LlamaCppAdapter:
        return load_adapter(self._library, self._model, self.plan.model, adapter)

    def drop_adapter(self, name: str) -> None:
        """Unload an adapter, after removing it from every context."""
        adapter = self.find_adapter(name)
        super().drop_adapter(name)
        for context in self._contexts.values():
            context.use_adapter(None)
        if adapter is not None:
            self._library.llama_adapter_lora_free(adapter.pointer)

    def _use_threads(self, count: int) -> None:
        self._choice = ThreadChoice(count)

    def interrupt(self) -> None:
        """End a running call before its next operator."""
        super().interrupt()
        self._stop.set()

    def _close(self) -> None:
        self._release()

    def _slots(self, storage: KVCacheConfig) -> int:
        return -(-self._capacity(storage.capacity_tokens) // CELLS) * CELLS

    def _capacity(self, tokens: int) -> int:
        """Return the tokens to reserve, which in exact mode include padding."""
        return tokens + (SPARE_TOKENS if self._exact else 0)

    def _layout(self, kv_bits: int) -> KVLayout:
        widths = tuple(layer.kv_heads * layer.head_dim for layer in self.plan.model.layers)
        return KVLayout(widths, kv_bits, transposed=self._exact)

    def _like_others(self, adapter: str) -> KVCacheConfig:
        """Return the configuration of a state with this adapter that fits an existing context, if there is one."""
        sizes: dict[str, int] = {}
        for kv_bits, cells in self._contexts:
            sizes = {"kv_bits": kv_bits, "capacity_tokens": cells - self._capacity(0)}
        return self.plan.storage.model_copy(update={"adapter": adapter, **sizes})

    def _load(self, path: Path) -> int:
        """Map the file without its tokenizer: edgekit has its own, and llama.cpp's has had the most vulnerabilities."""
        params = self._library.llama_model_default_params()
        overrides = (structs.Override * 3)()  # an empty one ends the list
        overrides[0].tag, overrides[0].key = structs.TEXT_OVERRIDE, b"tokenizer.ggml.model"
        overrides[0].value.val_str = b"none"
        if found := architecture_of(self.plan.model):
            # Files of other tools leave it to the tokenizer.
            overrides[1].tag, overrides[1].key = structs.NUMBER_OVERRIDE, f"{found[0]}.vocab_size".encode()
            overrides[1].value.val_i64 = self.plan.model.vocab_size
        params.kv_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        devices = (ctypes.c_void_p * 2)(self._gpu.pointer if self._gpu else None)  # the list ends with a null
        params.devices = ctypes.addressof(devices)
        params.n_gpu_layers = (self.plan.gpu_layers or 0) if self._gpu else 0
        model = self._library.llama_model_load_from_file(bytes(path), params)
        if not model:
            where = f" with {self.plan.gpu_layers} layers on {self._gpu.name}" if self._gpu else ""
            raise self._library.failure(f"{path} could not be loaded{where}")
        vocabulary = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(model))
        if vocabulary != self.plan.model.vocab_size:
            self._library.llama_model_free(model)
            raise DamagedArtifact(
                f"{path}: llama.cpp found {vocabulary:,} tokens, and the plan has {self.plan.model.vocab_size:,}"
            )
        return int(model)

    def _context(self, storage: KVCacheConfig) -> Context:
        """Return the context for this width and capacity; the first state allocates it for all sequences."""
        key = (storage.kv_bits, self._slots(storage))
        if key not in self._contexts:
            for other, context in list(self._contexts.items()):
                if context.is_unused:
                    self._contexts.pop(other).close()
            shape = ContextShape(
                kv_bits=storage.kv_bits,
                capacity_tokens=self._slots(storage),
                sequences=self.plan.sequences,
                batch_tokens=max(self.plan.chunk_tokens, LEAST_EXACT * self.plan.sequences),
                threads=self._choice.most,
                exact=self._exact,
                on_gpu=self._gpu is not None,
            )
            self._contexts[key] = Context(self._library, self._model, self.capabilities.vocabulary, shape, self._stop)
        return self._contexts[key]

    def _check_exactness(self, storage: KVCacheConfig) -> None:
        """Check exactness once for each machine, artifact and cache width. If it fails, close the engine and refuse."""
        versions = {"library": self._library.version, "threads": self.plan.threads}
        if self._gpu:
            versions["gpu"] = self._runs_on.strip()
        check_once(
            self, storage, self._admit, key=self._model_key, name=f"exact-llamacpp-{storage.kv_bits}",
            versions=versions, refusal=NOT_HERE,
        )  # fmt: skip
        self._exact_bits.add(storage.kv_bits)

    def _calls(self, states: Sequence[LlamaCppState], chunks: Sequence[Chunk]) -> Iterator[list[_Piece]]:
        """Group pieces into calls with one context and adapter, within the limits of tokens and logit rows.

        In exact mode only pieces of equal length share a call. The pieces of a chunk run in successive calls.
        """
        waiting = [list(self._pieces(index, chunk)) for index, chunk in enumerate(chunks)]
        while any(waiting):
            call: list[_Piece] = []
            kind: object = None
            tokens = rows = 0
            for pieces in waiting:
                if not pieces:
                    continue
                feed, state = self._feed(states, pieces[0]), states[pieces[0].chunk]
                its_kind = (state.context, state.storage.adapter, len(feed.tokens) if self._exact else 0)
                tokens, rows = tokens + len(feed.tokens), rows + feed.rows
                shape = state.context.shape
                if call and (its_kind != kind or tokens > shape.batch_tokens or rows > outputs_of(shape)):
                    tokens, rows = tokens - len(feed.tokens), rows - feed.rows
                    continue
                kind = its_kind
                call.append(pieces.pop(0))
            yield call

    def _pieces(self, index: int, chunk: Chunk) -> Iterator[_Piece]:
        """Cut a chunk so that no piece needs more logit rows than a call returns."""
        most, count = OUTPUTS - SPARE_TOKENS, len(chunk.tokens)
        first = count - max(0, chunk.num_logits - most)
        yield _Piece(index, chunk.tokens[:first], min(most, chunk.num_logits))
        for start in range(first, count, most):
            tokens = chunk.tokens[start : start + most]
            yield _Piece(index, tokens, len(tokens))

    def _feed(self, states: Sequence[LlamaCppState], piece: _Piece) -> Feed:
        state, least = states[piece.chunk], LEAST_EXACT if self._exact else 0
        spare = max(0, least - len(piece.tokens))
        tokens = [*piece.tokens, *[piece.tokens[-1]] * spare]
        return Feed(state.sequence, state.length, tokens, piece.num_logits, spare, least)

    def _run(self, states: Sequence[LlamaCppState], call: Sequence[_Piece]) -> list[Logits]:
        mine = [states[piece.chunk] for piece in call]
        adapter = self.find_adapter(mine[0].storage.adapter)
        context = mine[0].context
        for state in mine:
            state.settle()
        feeds = [self._feed(states, piece) for piece in call]
        context.use_adapter(None if adapter is None else adapter.pointer)
        logits = self._decode(context, feeds)
        for state, feed in zip(mine, feeds, strict=True):
            state.fed(len(feed.tokens) - feed.spare, feed.spare)
        return logits

    def _decode(self, context: Context, feeds: Sequence[Feed]) -> list[Logits]:
        if self._exact:
            return context.decode(feeds)
        tokens = sum(len(feed.tokens) for feed in feeds)
        context.use_threads(self._choice.threads(tokens))
        began = time.perf_counter()
        logits = context.decode(feeds)
        self._choice.note(tokens, time.perf_counter() - began)
        return logits


def _free(library: Library, contexts: dict[tuple[int, int], Context], model: int) -> None:
    """Free the caches, and then the model with its adapters."""
    for context in contexts.values():
        context.close()
    contexts.clear()
    library.llama_model_free(model)
