"""Runs the parts of a body and the head over rows of a slab, through bindings that point into our own buffers.

A binding keeps nothing alive: the buffers, the slab and the sessions all belong to the runner or outlive it. Bindings
are made once for each shape and then only their values change. Knows nothing of states, exactness or chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import vendor_errors
from edgekit_onnx.parts import Part
from edgekit_onnx.slab import KEY, VALUE, Slab

_KEPT_BINDINGS = 48


class Runner:
    """The sessions of one artifact and the buffers between them."""

    def __init__(
        self,
        bodies: Sequence[tuple[Part, Any]],
        head: Any,
        *,
        hidden_size: int,
        vocabulary: int,
        tokens: int,
        states: int,
        numbers: Any,
        device: str,
    ) -> None:
        self._bodies, self._head = tuple(bodies), head
        self._hidden_size, self._vocabulary, self._device = hidden_size, vocabulary, device
        self._ids = np.zeros(tokens, np.int64)
        self._lengths = np.zeros(states, np.int32)
        self._total = np.zeros(1, np.int32)
        # Parts write into the two by turns, so that none reads what it is writing.
        self._hidden = [np.zeros((tokens, hidden_size), numbers) for _ in range(2)]
        self._bound: OrderedDict[tuple[object, ...], Any] = OrderedDict()

    def body(self, slab: Slab, row: int, ids: NDArray[np.int64], lengths: Sequence[int], stop: int) -> NDArray[Any]:
        """Append `ids` [rows, tokens] to rows that begin at `row` and then hold `lengths`; return hidden states.

        Only the parts up to layer `stop` run. What comes back, [all tokens, hidden], is overwritten by the next call.
        """
        count, tokens = ids.shape
        self._ids[: ids.size] = ids.reshape(-1)
        for index, length in enumerate(lengths):
            self._lengths[index] = length - 1
        self._total[0] = max(lengths)
        buffer = 0
        with vendor_errors("onnx"):
            for index, (part, session) in enumerate(self._bodies):
                if part.start >= stop:
                    break
                session.run_with_iobinding(self._body_binding(index, slab, row, count, tokens))
                buffer = index % 2
        return self._hidden[buffer][: ids.size]

    def logits(self, hidden: NDArray[Any]) -> NDArray[np.float32]:
        """The logits of some rows of hidden states, in an array of their own."""
        found = np.empty((len(hidden), self._vocabulary), np.float32)
        binding = self._head.io_binding()
        with vendor_errors("onnx"):
            binding.bind_input("hidden_in", "cpu", 0, hidden.dtype.type, hidden.shape, hidden.ctypes.data)
            binding.bind_output("logits", "cpu", 0, np.float32, found.shape, found.ctypes.data)
            self._head.run_with_iobinding(binding)
        return found

    def forget(self, slab: Slab) -> None:
        """Drop the bindings that point into a slab."""
        for key in [key for key in self._bound if key[0] is slab]:
            del self._bound[key]

    def close(self) -> None:
        self._bound.clear()
        self._bodies, self._head = (), None

    def _body_binding(self, index: int, slab: Slab, row: int, count: int, tokens: int) -> Any:
        key = (slab, index, row, count, tokens)
        if key in self._bound:
            self._bound.move_to_end(key)
            return self._bound[key]
        part, session = self._bodies[index]
        binding = session.io_binding()
        hidden = (count, tokens, self._hidden_size)
        numbers = self._hidden[0].dtype.type
        if index == 0:
            binding.bind_input("input_ids", "cpu", 0, np.int64, (count, tokens), self._ids.ctypes.data)
        else:
            source = self._hidden[(index + 1) % 2]
            binding.bind_input("hidden_in", "cpu", 0, numbers, hidden, source.ctypes.data)
        binding.bind_input("seqlens_k", "cpu", 0, np.int32, (count,), self._lengths.ctypes.data)
        binding.bind_input("total", "cpu", 0, np.int32, (), self._total.ctypes.data)
        binding.bind_output("hidden", "cpu", 0, numbers, hidden, self._hidden[index % 2].ctypes.data)
        for layer in range(part.start, part.stop):
            shape = (count, slab.layers[layer].kv_heads, slab.capacity, slab.layers[layer].head_dim)
            for kind, name in ((KEY, "key"), (VALUE, "value")):
                place = slab.address(layer, kind, row)
                binding.bind_input(f"past.{layer}.{name}", self._device, 0, slab.dtype.type, shape, place)
                binding.bind_output(f"present.{layer}.{name}", self._device, 0, slab.dtype.type, shape, place)
        self._bound[key] = binding
        while len(self._bound) > _KEPT_BINDINGS:
            self._bound.popitem(last=False)
        return binding
