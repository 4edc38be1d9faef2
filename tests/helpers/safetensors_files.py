"""Writes safetensors: of arrays, or byte by byte, well formed or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgekit.formats.safetensors_writer import TensorWriter

Entry = dict[str, Any]
KINDS = {"float32": "F32", "float16": "F16", "int64": "I64", "bool": "BOOL"}


def entry(dtype: str, shape: list[int], start: int, stop: int) -> Entry:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write(path: Path, header: dict[str, Any] | str, data: bytes, length: int | None = None) -> Path:
    """A file of that header (as JSON, or as it is) and data; `length` is what it says the header has."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def write_tensors(folder: Path, tensors: Mapping[str, Any], name: str = "model.safetensors") -> None:
    """Write arrays as the only tensors of a file."""
    layout = {each: (KINDS[str(values.dtype)], values.shape) for each, values in tensors.items()}
    with TensorWriter(folder / name, layout) as writer:
        for each, values in tensors.items():
            writer.write(each, values)
        writer.seal()
