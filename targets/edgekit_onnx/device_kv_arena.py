"""Memory on onnxruntime's device: a KV arena, and the hidden states between two graphs.

Decoding copies none of it. Evictions, saving and restoring copy one layer at a time through the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import vendor_errors
from edgekit_onnx.kv_arena import LayerShape
from edgekit_onnx.pages import anonymous


class DeviceKVArena:
    """An arena whose layers are arrays on the device. Models with recurrent parts are refused on devices."""

    recurrent: tuple[NDArray[np.float32], ...] = ()

    def __init__(self, layers: Sequence[LayerShape], slots: int, capacity: int, dtype: Any, device: str) -> None:
        self.layers, self.slots, self.capacity, self.dtype = tuple(layers), slots, capacity, np.dtype(dtype)
        with vendor_errors("onnx"):
            self._values = [
                tuple(
                    _on_device((slots, layer.kv_heads, capacity, layer.head_dim), self.dtype, device) for _ in range(2)
                )
                for layer in self.layers
            ]

    def address(self, layer: int, kind: int, slot: int) -> int:
        slot_bytes = self.layers[layer].width * self.capacity * self.dtype.itemsize
        return int(self._values[layer][kind].data_ptr() + slot * slot_bytes)

    def read(self, layer: int, kind: int, slot: int) -> NDArray[Any]:
        array: NDArray[Any] = self._values[layer][kind].numpy()[slot]
        return array

    @contextmanager
    def edit(self, layer: int, kind: int, slot: int) -> Iterator[NDArray[Any]]:
        copied = np.array(self._values[layer][kind].numpy())
        yield copied[slot]
        self._values[layer][kind].update_inplace(copied)

    def trim(self, slot: int, length: int) -> None:
        """Do nothing: a device's memory is only freed with the whole arena."""

    def close(self) -> None:
        self._values = []


class DeviceArray:
    """Hidden states [rows, width] on the device, bound by address."""

    def __init__(self, rows: int, width: int, dtype: Any, device: str) -> None:
        self.dtype, self.device, self._width = np.dtype(dtype), device, width
        with vendor_errors("onnx"):
            self._value = _on_device((rows, width), self.dtype, device)

    def address(self, row: int = 0) -> int:
        return int(self._value.data_ptr() + row * self._width * self.dtype.itemsize)


class HostArray:
    """Hidden states [rows, width] in host memory."""

    def __init__(self, rows: int, width: int, dtype: Any) -> None:
        self.dtype, self.device, self._width = np.dtype(dtype), "cpu", width
        # numpy would request huge pages, in which a few rows take as much memory as thousands.
        memory = anonymous(max(1, rows * width * self.dtype.itemsize))
        self.values: NDArray[Any] = np.frombuffer(memory, self.dtype, rows * width).reshape(rows, width)

    def address(self, row: int = 0) -> int:
        return int(self.values.ctypes.data + row * self._width * self.dtype.itemsize)


def _on_device(shape: tuple[int, ...], dtype: np.dtype[Any], device: str) -> Any:
    """Allocate zeros, because masked values after the last token must not be NaN."""
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), device, 0)
