"""Memory that onnxruntime allocates on a device: a slab of keys and values, and the hidden states between two graphs.

Decoding never moves any of it. Closing a gap, saving and restoring go through the host, a layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import vendor_errors
from edgekit_onnx.pages import anonymous
from edgekit_onnx.slab import LayerShape


class DeviceSlab:
    """A slab whose layers are arrays on the device."""

    def __init__(self, layers: Sequence[LayerShape], rows: int, capacity: int, dtype: Any, device: str) -> None:
        self.layers, self.rows, self.capacity, self.dtype = tuple(layers), rows, capacity, np.dtype(dtype)
        with vendor_errors("onnx"):
            self._values = [
                tuple(
                    _on_device((rows, layer.kv_heads, capacity, layer.head_dim), self.dtype, device) for _ in range(2)
                )
                for layer in self.layers
            ]

    def address(self, layer: int, kind: int, row: int) -> int:
        each = self.layers[layer].width * self.capacity * self.dtype.itemsize
        return int(self._values[layer][kind].data_ptr() + row * each)

    def read(self, layer: int, kind: int, row: int) -> NDArray[Any]:
        found: NDArray[Any] = self._values[layer][kind].numpy()[row]
        return found

    @contextmanager
    def edit(self, layer: int, kind: int, row: int) -> Iterator[NDArray[Any]]:
        whole = np.array(self._values[layer][kind].numpy())
        yield whole[row]
        self._values[layer][kind].update_inplace(whole)

    def trim(self, row: int, length: int) -> None:
        """A device gives nothing back before the whole slab goes."""

    def close(self) -> None:
        self._values = []


class DeviceArray:
    """[rows, width] on the device, known to bindings by its address."""

    def __init__(self, rows: int, width: int, dtype: Any, device: str) -> None:
        self.dtype, self.device, self._width = np.dtype(dtype), device, width
        with vendor_errors("onnx"):
            self._value = _on_device((rows, width), self.dtype, device)

    def address(self, row: int = 0) -> int:
        return int(self._value.data_ptr() + row * self._width * self.dtype.itemsize)


class HostArray:
    """The same in the memory of this machine."""

    def __init__(self, rows: int, width: int, dtype: Any) -> None:
        self.dtype, self.device, self._width = np.dtype(dtype), "cpu", width
        # numpy would ask for huge pages, and a few rows then cost as much as thousands.
        memory = anonymous(max(1, rows * width * self.dtype.itemsize))
        self.values: NDArray[Any] = np.frombuffer(memory, self.dtype, rows * width).reshape(rows, width)

    def address(self, row: int = 0) -> int:
        return int(self.values.ctypes.data + row * self._width * self.dtype.itemsize)


def _on_device(shape: tuple[int, ...], dtype: np.dtype[Any], device: str) -> Any:
    """Zeros: what lies behind the last token is masked, but must not be NaN."""
    import onnxruntime

    return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), device, 0)
