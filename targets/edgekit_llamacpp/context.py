"""One llama.cpp context: the caches of several sequences with one cache width, and the calls that use them.

llama.cpp aborts the process on many wrong arguments, so all arguments here are checked before, by the engine's base
class, or come from this package.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import TargetFailed
from edgekit_llamacpp import structs
from edgekit_llamacpp.capabilities import GGML_TYPES
from edgekit_llamacpp.exactness import LEAST_EXACT
from edgekit_llamacpp.library import Library

if TYPE_CHECKING:
    from edgekit.contracts.engine import Logits

CELLS = 256  # llama.cpp rounds the tokens of a sequence up to a multiple of this
OUTPUTS = 16  # reserved rows of logits; calls that need more are cut
_FLASH_AUTO, _FLASH_OFF, _FLASH_ON = -1, 0, 1
_NO_SLOT = 1


class ContextShape(NamedTuple):
    """The sizes that a context is built for."""

    kv_bits: int
    capacity_tokens: int  # for each sequence
    sequences: int
    batch_tokens: int  # most tokens of one call, over all sequences
    threads: int
    exact: bool
    on_gpu: bool = False  # some layers run on a GPU, with their keys and values


class Feed(NamedTuple):
    """Tokens of one sequence in a call, from position `start` on. The last `spare` are padding.

    Logits are returned for the last `num_logits` real tokens. If there are any, at least `least_rows` are computed.
    """

    sequence: int
    start: int
    tokens: Sequence[int]
    num_logits: int
    spare: int = 0
    least_rows: int = 0

    @property
    def rows(self) -> int:
        """The number of logit rows to compute."""
        return max(self.num_logits + self.spare, self.least_rows) if self.num_logits else 0


class StopFlag:
    """A flag that llama.cpp asks for before every operator; once set, calls end.

    The function that it calls is C's `atoi`, on a text of one digit: one of Python's would wait for the interpreter's
    lock at every operator.
    """

    def __init__(self) -> None:
        self._digit = ctypes.create_string_buffer(b"0")
        self.function = ctypes.cast(ctypes.CDLL(None).atoi, ctypes.c_void_p)
        self.argument = ctypes.cast(self._digit, ctypes.c_void_p)

    def set(self) -> None:
        self._digit.value = b"1"


class Context:
    """A llama.cpp context and its free sequences. Close it before its model."""

    def __init__(self, library: Library, model: int, vocabulary: int, shape: ContextShape, stop: StopFlag) -> None:
        self._library, self._vocabulary, self.shape = library, vocabulary, shape
        cells = -(-shape.capacity_tokens // CELLS) * CELLS
        params = library.llama_context_default_params()
        params.n_ctx, params.n_seq_max = cells * shape.sequences, shape.sequences
        params.n_batch = params.n_ubatch = shape.batch_tokens
        params.n_outputs_max = outputs_of(shape)
        params.n_threads = params.n_threads_batch = shape.threads
        params.type_k = params.type_v = GGML_TYPES[shape.kv_bits]
        # A quantised cache needs flash attention. Exact mode needs it off, because its sums depend on the call's shape.
        params.flash_attn_type = _FLASH_OFF if shape.exact else _FLASH_ON if shape.kv_bits < 16 else _FLASH_AUTO
        # Cache all tokens despite windows, or states could not be rewound; a unified cache would interleave sequences.
        params.swa_full, params.kv_unified = True, False
        params.offload_kqv = params.op_offload = shape.on_gpu
        self._stop = stop  # it must live as long as the context
        params.abort_callback, params.abort_callback_data = stop.function, stop.argument
        self._pointer = library.llama_init_from_model(model, params)
        if not self._pointer:
            raise library.failure("the cache could not be allocated")
        found = int(library.llama_n_ctx_seq(self._pointer))
        if found < shape.capacity_tokens:
            self.close()
            raise TargetFailed(f"llamacpp: asked for {shape.capacity_tokens} tokens a sequence, got {found}")
        self._memory = library.llama_get_memory(self._pointer)
        self.can_shift = bool(library.llama_memory_can_shift(self._memory))
        self.free = list(range(shape.sequences))
        self._batch = _BatchArrays(shape.batch_tokens)
        self._adapter: int | None = None
        self._threads = shape.threads

    @property
    def is_unused(self) -> bool:
        return len(self.free) == self.shape.sequences

    def take(self) -> int:
        """Take a free sequence; the caller checked that there is one."""
        return self.free.pop(0)

    def give_back(self, sequence: int) -> None:
        """Empty a sequence and mark it as free."""
        self.remove(sequence, 0)
        self.free.append(sequence)

    def use_threads(self, count: int) -> None:
        """Compute with that many threads from the next call on."""
        if count != self._threads:
            self._library.llama_set_n_threads(self._pointer, count, count)
            self._threads = count

    def decode(self, feeds: Sequence[Feed]) -> list[Logits]:
        """Append tokens; return the requested logits of each feed. The feeds must fit the batch and `outputs_of`."""
        count = self._batch.fill(feeds)
        status = self._library.llama_decode(self._pointer, self._batch.struct)
        if status != 0:
            what = "the cache is full" if status == _NO_SLOT else f"a call of {count} tokens failed ({status})"
            raise self._library.failure(what)
        answers, end = [], 0
        for feed in feeds:
            end += len(feed.tokens)
            rows = np.empty((feed.num_logits, self._vocabulary), np.float32)
            for row, index in enumerate(range(end - feed.spare - feed.num_logits, end - feed.spare)):
                pointer = self._library.llama_get_logits_ith(self._pointer, index)
                if not pointer:
                    raise self._library.failure("it returned no logits")
                rows[row] = np.ctypeslib.as_array(pointer, (self._vocabulary,))
            answers.append(rows)
        return answers

    def remove(self, sequence: int, start: int) -> None:
        """Forget the tokens of a sequence from `start` on."""
        if not self._library.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise self._library.failure(f"tokens from {start} on could not be removed")

    def close_gap(self, sequence: int, start: int, stop: int) -> None:
        """Drop the tokens `start` to `stop` and move later ones down; llama.cpp rotates their keys at the next call."""
        if not self._library.llama_memory_seq_rm(self._memory, sequence, start, stop):
            raise self._library.failure(f"tokens {start} to {stop} could not be removed")
        self._library.llama_memory_seq_add(self._memory, sequence, stop, -1, start - stop)

    def read(self, sequence: int) -> NDArray[np.uint8]:
        """Return the keys and values of a sequence as llama.cpp serialises them."""
        size = int(self._library.llama_state_seq_get_size_ext(self._pointer, sequence, 0))
        data = np.empty(size, np.uint8)
        done = self._library.llama_state_seq_get_data_ext(self._pointer, _bytes(data), size, sequence, 0)
        if done != size:
            raise self._library.failure("keys and values could not be read")
        return data

    def read_any(self, sequence: int) -> NDArray[np.uint8]:
        """Return the `read` data of an arbitrary token, as a template. The sequence is empty before and after."""
        self.decode([Feed(sequence, 0, [0], 0)])
        data = self.read(sequence)
        self.remove(sequence, 0)
        return data

    def write(self, sequence: int, data: NDArray[np.uint8]) -> None:
        """Replace the keys and values of a sequence."""
        done = self._library.llama_state_seq_set_data_ext(self._pointer, _bytes(data), data.size, sequence, 0)
        if done != data.size:
            raise self._library.failure("keys and values could not be restored")

    def use_adapter(self, adapter: int | None) -> None:
        """Use this adapter in the next calls; None: no adapter."""
        if adapter == self._adapter:
            return
        count = 0 if adapter is None else 1
        pointers, scales = (ctypes.c_void_p * 1)(adapter), (ctypes.c_float * 1)(1.0)
        if self._library.llama_set_adapters_lora(self._pointer, pointers, count, scales):
            raise self._library.failure("the adapter could not be set")
        self._adapter = adapter

    def close(self) -> None:
        """Free the caches."""
        if self._pointer:
            self._library.llama_free(self._pointer)
            self._pointer = None


def outputs_of(shape: ContextShape) -> int:
    """Return the largest number of logit rows in one call."""
    return max(OUTPUTS, shape.sequences * (LEAST_EXACT if shape.exact else 1))


class _BatchArrays:
    """The arrays for the tokens of a call, allocated once."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._positions = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
        self._sequences, self._wanted = np.zeros(tokens, np.int32), np.zeros(tokens, np.int8)
        self._ones = np.ones(tokens, np.int32)
        int32 = ctypes.POINTER(ctypes.c_int32)
        # Each token points at its own sequence number.
        first, width = self._sequences.ctypes.data, self._sequences.itemsize
        self._lists = (int32 * tokens)(*(ctypes.cast(first + index * width, int32) for index in range(tokens)))
        self.struct = structs.TokenBatch(
            0,
            self._tokens.ctypes.data_as(int32),
            None,
            self._positions.ctypes.data_as(int32),
            self._ones.ctypes.data_as(int32),
            self._lists,
            self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, feeds: Sequence[Feed]) -> int:
        """Write the tokens of all feeds, one after the other; return their number."""
        end = 0
        for feed in feeds:
            start, end = end, end + len(feed.tokens)
            self._tokens[start:end] = feed.tokens
            self._positions[start:end] = np.arange(feed.start, feed.start + len(feed.tokens))
            self._sequences[start:end] = feed.sequence
            self._wanted[start : end - feed.rows] = 0
            self._wanted[end - feed.rows : end] = 1
        self.struct.n_tokens = end
        return end


def _bytes(data: NDArray[np.uint8]) -> ctypes._Pointer[ctypes.c_uint8]:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
