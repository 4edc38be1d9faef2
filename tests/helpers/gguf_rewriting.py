"""Writes a GGUF file again with other tensor types, as llama.cpp's quantiser does: the metadata is copied unread."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from edgekit.formats.gguf import GgufFile
from edgekit.formats.gguf_types import TYPES

ALIGNMENT = 32
_ROWS = 4096


def rewrite(source: Path, place: Path, type_of: Callable[[str, tuple[int, ...]], str | None]) -> Path:
    """Write `source` at `place`; `type_of` names the type of a tensor by llama.cpp's name, or None to leave it."""
    numbers = {kind.name: number for number, kind in TYPES.items()}
    with GgufFile.open(source) as file, place.open("wb") as out:
        kinds = {
            name: numbers[type_of(name, tensor.shape) or tensor.type_name] for name, tensor in file.tensors.items()
        }
        names, table, position = [], b"", 0
        for name, tensor in file.tensors.items():
            kind, text = TYPES[kinds[name]], name.encode()
            names.append(struct.pack("<Q", len(text)) + text + struct.pack("<I", len(tensor.shape)))
            dimensions = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
            table += names[-1] + dimensions + struct.pack("<IQ", kinds[name], position)
            size = int(np.prod(tensor.shape)) // kind.values * kind.bytes
            position += -(-size // ALIGNMENT) * ALIGNMENT
        with source.open("rb") as original:
            header = original.read(file.header_bytes)
        out.write(header[: header.rindex(names[0])] + table)
        out.write(bytes(-out.tell() % ALIGNMENT))
        for name, tensor in file.tensors.items():
            rows = int(np.prod(tensor.shape[:-1]))
            for begin in range(0, rows, _ROWS):
                index = slice(begin, min(rows, begin + _ROWS))
                if kinds[name] == tensor.type_id:
                    out.write(file._blocks(tensor, index).tobytes())
                else:
                    out.write(quantize(file.rows(name, index), GGMLQuantizationType(kinds[name])).tobytes())
            out.write(bytes(-out.tell() % ALIGNMENT))
    return place
