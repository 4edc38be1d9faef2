"""Runs the parts of a body and the head over slots of a KV arena, with bindings to preallocated buffers.

A binding keeps nothing alive, so buffers, arena and sessions must belong to the runner or outlive it. A binding is made
once for each shape; afterwards only the values in the buffers change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.common.footprint import return_unused
from edgekit.contracts.recurrent import recurrent_arrays
from edgekit.errors import vendor_errors
from edgekit.model.spec import ModelSpec
from edgekit_onnx.device_kv_arena import DeviceArray, HostArray
from edgekit_onnx.float16_kv import TOKENS_AT_ONCE
from edgekit_onnx.kv_arena import KEY, VALUE, KVArena
from edgekit_onnx.layout import GraphPart, attention_name, hidden_name
from edgekit_onnx.loading import AuditedArtifact
from edgekit_onnx.memory import KEPT_TOKENS
from edgekit_onnx.sessions import CallOptions

if TYPE_CHECKING:
    from edgekit_onnx.session_variants import StateSessions

_KEPT_BINDINGS = 48
_KEPT_LOGITS = 4  # rows; for more, a new binding is made each time
_USUAL_ROWS = 16  # as many as one verification of drafts asks for


class BodyCall(NamedTuple):
    """What one call of the body appends and runs.

    With `start` above 0, the input is read from `hidden(start)` and the ids are ignored.
    """

    ids: NDArray[np.int64]  # [slots, tokens]
    lengths: Sequence[int]  # tokens in each slot after the call
    stop: int  # layer
    start: int = 0
    kept: int = 0  # the first tokens, which recurrent parts include
    gives_back: bool = False  # return unused memory of activations to the system
    keeps_hidden: bool = False  # store hidden states for `hidden_states`
    # An array for each layer's weights, of graphs that give them, in a call of one piece.
    attention: Mapping[int, NDArray[np.float32]] | None = None


class _Inputs(NamedTuple):
    """The buffers that each call fills anew."""

    ids: NDArray[np.int64]
    lengths: NDArray[np.int32]  # in tokens, of each slot
    total: NDArray[np.int32]
    kept: NDArray[np.int64]


class Runner:
    """The head's session, the buffers between the parts, and their bindings."""

    def __init__(
        self,
        loaded: AuditedArtifact,
        model: ModelSpec,
        *,
        tokens: int,
        states: int,
        hidden_layers: Sequence[int] = (),
    ) -> None:
        # Each layer's owner of the keys and values that it attends to.
        self._owners = [model.kv_owner(index) for index in range(len(model.layers))]
        self._recurrent = recurrent_arrays(model)
        self._model = model
        self._head, self._device = loaded.head, loaded.device
        self._converts = loaded.device == "cpu" and not loaded.graphs.kernels  # caches of 16 bits, to attend to them
        self._inputs = _Inputs(
            np.zeros(tokens, np.int64), np.zeros(states, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int64)
        )
        # Parts alternate between the two, so that no part reads the buffer that it writes.
        self._hidden = [loaded.array(tokens, model.hidden_size) for _ in range(2)]
        self._last = self._hidden[0]
        # Hidden states after these layers, for calls that request them. Unwritten pages take no memory.
        self._hidden_layers = tuple(hidden_layers)
        self._asked = {layer: HostArray(tokens, model.hidden_size, loaded.numbers) for layer in set(hidden_layers)}
        self._logits = np.empty((_KEPT_LOGITS, model.vocab_size), np.float32)  # unwritten pages take no memory
        self._options = CallOptions(loaded.device)
        self._bound: OrderedDict[tuple[object, ...], Any] = OrderedDict()

    def body(self, running: StateSessions, arena: KVArena, slot: int, call: BodyCall) -> None:
        """Append the ids to the slots from `slot` on, and run the layers from `start` to `stop`."""
        ids, kept, attention = call.ids, call.kept, call.attention
        count, tokens = ids.shape
        self._inputs.ids[: ids.size] = ids.reshape(-1)
        in_halves = arena.dtype == np.float16 and (self._converts or attention is not None)
        # In float16, attention converts the cached keys and values of a head to float32. So each step of an answer
        # requests larger buffers than the one before, and the arena would keep the buffers of every step.
        is_step = in_halves and tokens <= KEPT_TOKENS
        with vendor_errors("onnx"):
            for index, (part, session) in enumerate(running.sessions):
                if part.start < call.start:
                    continue
                if part.start >= call.stop:
                    break
                options = self._options.giving_back if call.gives_back or is_step else self._options.usual
                for row, end in _pieces(tokens, TOKENS_AT_ONCE if in_halves else tokens, kept):
                    self._inputs.lengths[:count] = np.subtract(call.lengths, tokens - end + 1)
                    self._inputs.total[0] = max(call.lengths) - (tokens - end)
                    self._inputs.kept[0] = max(0, min(kept, end) - row)
                    piece = (count, row, end)
                    bind = partial(self._bind, index, running, arena, slot, piece, call.keeps_hidden)
                    if attention is None:
                        binding = self._kept((arena, index, slot, piece, call.keeps_hidden), bind)
                    else:
                        binding = bind()
                        _bind_attention(binding, part, attention)
                    session.run_with_iobinding(binding, options)
                self._last = self._hidden[index % 2]
                if call.keeps_hidden and part.stop in self._asked:
                    self._asked[part.stop].values[: ids.size] = self.hidden(running, part.stop)[: ids.size]
        if call.gives_back:
            return_unused()

    def logits(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return logits of the tokens `start` to `stop` of the last `body` call, in a new array."""
        rows = stop - start
        with vendor_errors("onnx"):
            if rows > len(self._logits):
                logits = self._new_rows(rows)
                self._head.run_with_iobinding(self._head_binding(start, logits), self._options.usual)
                return logits
            bind = partial(self._head_binding, start, self._logits[:rows])
            binding = self._kept((self._head, self._last, start, rows), bind)
            self._head.run_with_iobinding(binding, self._options.usual)
        logits = self._new_rows(rows)
        logits[:] = self._logits[:rows]
        return logits

    def _new_rows(self, rows: int) -> NDArray[np.float32]:
        """Return an array of logits; of several rows always as part of a large one, so that malloc reuses its memory.

        Arrays of changing sizes, of a megabyte a row with a large vocabulary, would fragment the heap.
        """
        size = rows if rows == 1 else max(rows, _USUAL_ROWS)
        return np.empty((size, self._model.vocab_size), np.float32)[:rows]

    def last_hidden(self, start: int, stop: int) -> NDArray[Any]:
        """Return a view of the hidden states of the tokens `start` to `stop` of the last `body` call; CPU only."""
        assert isinstance(self._last, HostArray)
        return self._last.values[start:stop]

    def hidden(self, running: StateSessions, stop: int) -> NDArray[Any]:
        """Return the buffer of hidden states [tokens, width] after layer `stop`, at which a part ends; CPU only."""
        index = next(index for index, (part, _) in enumerate(running.sessions) if part.stop == stop)
        array = self._hidden[index % 2]
        assert isinstance(array, HostArray)
        return array.values

    def hidden_states(self, tokens: int) -> NDArray[np.float32]:
        """Return the first tokens' hidden states of the last `body` call, after all layers of `hidden_layers`."""
        parts = [self._asked[layer].values[:tokens] for layer in self._hidden_layers]
        return np.concatenate(parts, axis=1, dtype=np.float32)

    def forget(self, arena: KVArena) -> None:
        """Drop every binding that points into an arena that is about to be closed."""
        for key in [key for key in self._bound if key[0] is arena]:
            del self._bound[key]

    def interrupt(self) -> None:
        self._options.terminate()

    def close(self) -> None:
        self._bound.clear()
        self._head = None

    def _head_binding(self, start: int, logits: NDArray[np.float32]) -> Any:
        """Bind the hidden states from row `start` on, and the output array of their logits."""
        binding = self._head.io_binding()
        self._bind_hidden(binding.bind_input, "hidden_in", self._last, (len(logits), self._model.hidden_size), start)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        return binding

    def _kept(self, key: tuple[object, ...], bind: Callable[[], Any]) -> Any:
        """Return a binding that is kept, or make it; drop the least recently used ones.

        The arena is part of a key, so its memory stays alive. A part's session is not: an open arena is always run by
        the same ones.
        """
        if key not in self._bound:
            self._bound[key] = bind()
        self._bound.move_to_end(key)
        while len(self._bound) > _KEPT_BINDINGS:
            self._bound.popitem(last=False)
        return self._bound[key]

    def _bind(
        self,
        index: int,
        running: StateSessions,
        arena: KVArena,
        slot: int,
        piece: tuple[int, int, int],
        keeps_hidden: bool,
    ) -> Any:
        """Bind all inputs and outputs of one part for a piece of a call: (number of slots, first token, end)."""
        count, row, end = piece
        tokens = end - row
        part, session = running.sessions[index]
        binding = session.io_binding()
        for name, value in running.inputs[index]:
            binding.bind_ortvalue_input(name, value)
        if index == 0:
            binding.bind_input("input_ids", "cpu", 0, np.int64, (count, tokens), self._inputs.ids[row:].ctypes.data)
        else:
            source = self._hidden[(index + 1) % 2]
            self._bind_hidden(binding.bind_input, "hidden_in", source, (count, tokens, self._model.hidden_size), row)
        binding.bind_input("seqlens_k", "cpu", 0, np.int32, (count,), self._inputs.lengths.ctypes.data)
        binding.bind_input("total", "cpu", 0, np.int32, (), self._inputs.total.ctypes.data)
        output = self._hidden[index % 2]
        self._bind_hidden(binding.bind_output, "hidden", output, (count, tokens, self._model.hidden_size), row)
        if any(part.start <= each.layer < part.stop for each in self._recurrent):
            binding.bind_input("kept", "cpu", 0, np.int64, (1,), self._inputs.kept.ctypes.data)
        for each, values in zip(self._recurrent, arena.recurrent, strict=True):
            if part.start <= each.layer < part.stop:
                rows, name = values[slot : slot + count], f"{each.layer}.{each.name}"
                binding.bind_input(f"past.{name}", "cpu", 0, np.float32, rows.shape, rows.ctypes.data)
                binding.bind_output(f"present.{name}", "cpu", 0, np.float32, rows.shape, rows.ctypes.data)
        for layer, asked in self._asked.items() if keeps_hidden else ():
            if part.start < layer < part.stop:
                self._bind_hidden(
                    binding.bind_output, hidden_name(layer), asked, (count, tokens, self._model.hidden_size), row
                )
        for layer in range(part.start, part.stop):
            owner = self._owners[layer]
            if not arena.layers[owner].kv_heads:
                continue
            shape = (count, arena.layers[owner].kv_heads, arena.capacity, arena.layers[owner].head_dim)
            for kind, name in ((KEY, "key"), (VALUE, "value")):
                address = arena.address(owner, kind, slot)
                binding.bind_input(f"past.{owner}.{name}", self._device, 0, arena.dtype.type, shape, address)
                binding.bind_output(f"present.{layer}.{name}", self._device, 0, arena.dtype.type, shape, address)
        return binding

    @staticmethod
    def _bind_hidden(
        bind: Any, name: str, array: DeviceArray | HostArray, shape: tuple[int, ...], row: int = 0
    ) -> None:
        bind(name, array.device, 0, array.dtype.type, shape, array.address(row))


def _bind_attention(binding: Any, part: GraphPart, attention: Mapping[int, NDArray[np.float32]]) -> None:
    for layer, array in attention.items():
        if part.start <= layer < part.stop:
            binding.bind_output(attention_name(layer), "cpu", 0, np.float32, array.shape, array.ctypes.data)


def _pieces(tokens: int, most: int, kept: int) -> Iterator[tuple[int, int]]:
    """Cut a call into pieces of at most `most` tokens, with a cut after the first `kept` ones, if need be.

    No piece may follow tokens that the recurrent part leaves out. Such tokens end a call that verifies
    drafts, and are fewer than a piece has.
    """
    row = 0
    while row < tokens:
        end = row + most
        if end < tokens and row < kept:
            end = min(end, kept)
        yield row, min(end, tokens)
        row = end
