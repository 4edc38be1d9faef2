"""Writes safetensors byte by byte, well formed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


def entry(dtype: str, shape: list[int], start: int, stop: int) -> Entry:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write(path: Path, header: dict[str, Any] | str, data: bytes, length: int | None = None) -> Path:
    """A file of that header (as JSON, or as it is) and data; `length` is what it says the header has."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path
