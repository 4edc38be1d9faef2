"""The keys and values of a run of tokens, outside a state: copied, cut in two, written to a file and read again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import DamagedArtifact, InvalidInput, clip
from edgekit.files import write_file
from edgekit.reading import parse_json, read_bytes
from edgekit_onnx.slab import LayerShape, row_bytes

_MAGIC = b"edgekit kv 1\n"
_MAX_HEADER_BYTES = 4096


class OnnxSegment:
    """Tokens from `start` on of a state. Its arrays are [kv_head, token, head_dim], keys and values by turns."""

    def __init__(self, start: int, tokens: int, arrays: Sequence[NDArray[Any]], model_key: str) -> None:
        self.start, self.tokens, self.arrays, self.model_key = start, tokens, tuple(arrays), model_key

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def split(self, count: int) -> tuple[OnnxSegment, OnnxSegment]:
        """The first `count` tokens, and the others. Each has its own memory, so that one may go before the other."""
        if not 0 <= count <= self.tokens:
            raise InvalidInput(f"a segment of {self.tokens} tokens cannot be split after {count}")
        first, second = (
            [array[:, part].copy() for array in self.arrays] for part in (slice(count), slice(count, None))
        )
        return (
            OnnxSegment(self.start, count, first, self.model_key),
            OnnxSegment(self.start + count, self.tokens - count, second, self.model_key),
        )

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        body = b"".join(array.tobytes() for array in self.arrays)
        header = {
            "model": self.model_key,
            "start": self.start,
            "tokens": self.tokens,
            "bytes": len(body),
            "sha256": hashlib.sha256(body).hexdigest(),
        }
        write_file(path, _MAGIC + json.dumps(header).encode() + b"\n" + body)


def read_segment(
    path: Path, layers: Sequence[LayerShape], dtype: np.dtype[Any], model_key: str, capacity: int
) -> OnnxSegment:
    """What `write` wrote; refused unless it is whole and of this model."""
    limit = len(_MAGIC) + _MAX_HEADER_BYTES + row_bytes(layers, capacity, dtype.itemsize)
    data = read_bytes(path, limit)
    end = data.find(b"\n", len(_MAGIC), len(_MAGIC) + _MAX_HEADER_BYTES)
    if not data.startswith(_MAGIC) or end < 0:
        raise InvalidInput(f"{path}: is not a saved prefix of this edgekit; remove it")
    header = parse_json(data[len(_MAGIC) : end], str(path))
    start, tokens = header.get("start"), header.get("tokens")
    if header.get("model") != model_key:
        raise InvalidInput(f"{path}: was saved by another model or another artifact ({clip(header.get('model'))})")
    if type(start) is not int or type(tokens) is not int or start < 0 or not 0 <= tokens <= capacity - start:
        raise InvalidInput(f"{path}: says {clip(tokens)} tokens from {clip(start)}; a state holds {capacity}")
    body = memoryview(data)[end + 1 :]
    shapes = [(layer.kv_heads, tokens, layer.head_dim) for layer in layers for _ in range(2)]
    needed = sum(int(np.prod(shape)) for shape in shapes) * dtype.itemsize
    if len(body) != needed or hashlib.sha256(body).hexdigest() != header.get("sha256"):
        raise DamagedArtifact(f"{path}: its bytes are not those that were written; remove it")
    arrays, offset = [], 0
    for shape in shapes:
        size = int(np.prod(shape)) * dtype.itemsize
        arrays.append(np.frombuffer(body[offset : offset + size], dtype).reshape(shape))
        offset += size
    return OnnxSegment(start, tokens, arrays, model_key)
