"""Runs the parts of a body and the head over rows of a slab, through bindings that point into our own buffers.

A binding keeps nothing alive: the buffers, the slab and the sessions all belong to the runner or outlive it. Bindings
are made once for each shape and then only their values change. Knows nothing of states, exactness or chunks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import vendor_errors
from edgekit.heap import return_unused
from edgekit_onnx.device_memory import DeviceArray, HostArray
from edgekit_onnx.loading import Loaded
from edgekit_onnx.sessions import giving_back
from edgekit_onnx.slab import KEY, VALUE, Slab

if TYPE_CHECKING:
    from edgekit_onnx.bodies import Running

_KEPT_BINDINGS = 48


class Runner:
    """The sessions of one artifact and the buffers between them."""

    def __init__(self, loaded: Loaded, *, hidden_size: int, vocabulary: int, tokens: int, states: int) -> None:
        self._head, self._device = loaded.head, loaded.device
        self._hidden_size, self._vocabulary = hidden_size, vocabulary
        self._ids = np.zeros(tokens, np.int64)
        self._lengths = np.zeros(states, np.int32)
        self._total = np.zeros(1, np.int32)
        # Parts write into the two by turns, so that none reads what it is writing.
        self._hidden = [loaded.array(tokens, hidden_size) for _ in range(2)]
        self._last = self._hidden[0]
        self._giving_back = giving_back() if loaded.device == "cpu" else None
        self._bound: OrderedDict[tuple[object, ...], Any] = OrderedDict()

    def body(
        self,
        running: Running,
        slab: Slab,
        row: int,
        ids: NDArray[np.int64],
        lengths: Sequence[int],
        stop: int,
        *,
        start: int = 0,
        gives_back: bool = False,
    ) -> None:
        """Append `ids` [rows, tokens] to the rows from `row` on, which then hold `lengths`; layers up to `stop` run.

        With `start`, the layers before it have run: what they said is in `hidden`, and the tokens are not looked at.
        With `gives_back`, what calls needed so far beside their results goes back to the system with this one.
        """
        count, tokens = ids.shape
        self._ids[: ids.size] = ids.reshape(-1)
        self._lengths[:count] = lengths
        self._lengths[:count] -= 1
        self._total[0] = max(lengths)
        with vendor_errors("onnx"):
            for index, (part, session) in enumerate(running.sessions):
                if part.start < start:
                    continue
                if part.start >= stop:
                    break
                how = self._giving_back if gives_back else None
                session.run_with_iobinding(self._binding(index, running, slab, row, count, tokens), how)
                self._last = self._hidden[index % 2]
        if gives_back:
            return_unused()

    def logits(self, start: int, stop: int) -> NDArray[np.float32]:
        """The logits after those of the tokens that the last `body` fed, in an array of their own."""
        found = np.empty((stop - start, self._vocabulary), np.float32)
        with vendor_errors("onnx"):
            binding = self._head.io_binding()
            self._bind_hidden(binding.bind_input, "hidden_in", self._last, (stop - start, self._hidden_size), start)
            binding.bind_output("logits", "cpu", 0, np.float32, found.shape, found.ctypes.data)
            self._head.run_with_iobinding(binding)
        return found

    def hidden(self, running: Running, stop: int) -> NDArray[Any]:
        """[tokens, width]: what the part that leaves at layer `stop` said, and what the next one reads. On the CPU."""
        index = next(index for index, (part, _) in enumerate(running.sessions) if part.stop == stop)
        array = self._hidden[index % 2]
        assert isinstance(array, HostArray)
        return array.values

    def forget(self, slab: Slab) -> None:
        """The slab goes, and with it every binding that points into it."""
        for key in [key for key in self._bound if key[0] is slab]:
            del self._bound[key]

    def close(self) -> None:
        self._bound.clear()
        self._head = None

    def _binding(self, index: int, running: Running, slab: Slab, row: int, count: int, tokens: int) -> Any:
        """Everything that one part reads and writes. The slab is a part of the key, so its memory stays alive."""
        key = (slab, index, row, count, tokens)  # the same sessions run a slab as long as it lives
        if key in self._bound:
            self._bound.move_to_end(key)
            return self._bound[key]
        part, session = running.sessions[index]
        binding = session.io_binding()
        for name, value in running.inputs[index]:
            binding.bind_ortvalue_input(name, value)
        if index == 0:
            binding.bind_input("input_ids", "cpu", 0, np.int64, (count, tokens), self._ids.ctypes.data)
        else:
            source = self._hidden[(index + 1) % 2]
            self._bind_hidden(binding.bind_input, "hidden_in", source, (count, tokens, self._hidden_size))
        binding.bind_input("seqlens_k", "cpu", 0, np.int32, (count,), self._lengths.ctypes.data)
        binding.bind_input("total", "cpu", 0, np.int32, (), self._total.ctypes.data)
        output = self._hidden[index % 2]
        self._bind_hidden(binding.bind_output, "hidden", output, (count, tokens, self._hidden_size))
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

    @staticmethod
    def _bind_hidden(
        bind: Any, name: str, array: DeviceArray | HostArray, shape: tuple[int, ...], row: int = 0
    ) -> None:
        bind(name, array.device, 0, array.dtype.type, shape, array.address(row))
