"""Writes GGUF files: metadata, then tensors that are streamed a few rows at a time."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edgekit.common.files import disk_full
from edgekit.formats.gguf import DEFAULT_ALIGNMENT, MAGIC
from edgekit.formats.gguf_types import TYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 3
BLOCK = 32  # values of a row that share a scale in Q4_0 and Q8_0
TYPE_IDS = {kind.name: number for number, kind in TYPES.items()}
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}
_FILE_TYPES |= {"Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30}
_DTYPES = {"int32": (_INT32, "<i4"), "float32": (_FLOAT32, "<f4"), "bool": (_BOOL, "u1")}

# int is stored as uint32, float as float32
MetadataValue = bool | int | float | str | Sequence[str] | np.ndarray[Any, np.dtype[Any]]


class WrittenTensor(NamedTuple):
    """A tensor to write: GGUF's name of its type, its shape with rows first, and its bytes in pieces."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[NDArray[Any]]]

    @property
    def bytes(self) -> int:
        kind = TYPES[TYPE_IDS[self.type_name]]
        return math.prod(self.shape) // kind.values * kind.bytes


def write_gguf(
    path: Path,
    metadata: Mapping[str, MetadataValue],
    tensors: Sequence[WrittenTensor],
    done: Callable[[str], None] = lambda name: None,
) -> None:
    """Write a file; `done` is called with each tensor's name before the tensor is written.

    The file states the number of its commonest type. Ollama shows it, and OpenVINO opens no file without it.
    """
    sizes = {name: sum(each.bytes for each in tensors if each.type_name == name) for name in _FILE_TYPES}
    header = _header({**metadata, "general.file_type": _FILE_TYPES[max(sizes, key=sizes.__getitem__)]}, tensors)
    with disk_full(path, len(header) + sum(tensor.bytes for tensor in tensors)), path.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            done(tensor.name)
            start = file.tell()
            for piece in tensor.pieces():
                file.write(np.ascontiguousarray(piece).data)
            assert file.tell() - start == tensor.bytes, tensor.name
            file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))


def q4_0(integers: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Pack rows of integers in [-8, 7], with one scale per group, as blocks of 32."""
    values, halves = _blocks(integers, scales)
    raised = (values + 8).astype(np.uint8)
    return np.concatenate([halves, raised[..., : BLOCK // 2] | raised[..., BLOCK // 2 :] << 4], axis=2)


def q4_1(packed: NDArray[np.uint8], scales: NDArray[np.float32], minima: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Pack rows of unsigned integers of 4 bits, with a scale and a minimum for each group, as blocks of 32."""
    values, halves = _blocks(packed, scales)
    lows = _blocks(packed, minima)[1]
    return np.concatenate([halves, lows, values[..., : BLOCK // 2] | values[..., BLOCK // 2 :] << 4], axis=2)


def q8_0(integers: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Pack rows of integers in [-128, 127], with one scale per group, as blocks of 32."""
    values, halves = _blocks(integers, scales)
    return np.concatenate([halves, values.view(np.uint8)], axis=2)


def _blocks(integers: NDArray[Any], scales: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return the integers [rows, blocks, 32] and the bytes of each block's float16 scale; larger groups repeat it."""
    blocks = integers.shape[1] // BLOCK
    repeated = np.repeat(scales, blocks // scales.shape[1], axis=1).astype("<f2")
    return integers.reshape(-1, blocks, BLOCK), repeated[..., None].view(np.uint8)


def _header(metadata: Mapping[str, MetadataValue], tensors: Sequence[WrittenTensor]) -> bytes:
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    offset = 0
    for tensor in tensors:
        parts += [_string(tensor.name), struct.pack("<I", len(tensor.shape))]
        parts.append(struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)))
        parts.append(struct.pack("<IQ", TYPE_IDS[tensor.type_name], offset))
        offset += -(-tensor.bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    header = b"".join(parts)
    return header + bytes(-len(header) % DEFAULT_ALIGNMENT)


def _value(value: MetadataValue) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, np.ndarray):
        kind, dtype = _DTYPES[value.dtype.name]
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + value.astype(dtype).tobytes()
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_string(text) for text in value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
