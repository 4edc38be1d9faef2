"""A store of measurements and marks of artifacts on this machine, keyed by artifact hash and machine.

A mark says that a check passed. Both can be made again, so an unreadable or read-only store is not an error, and a
damaged fact is the same as none.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from edgekit.common.files import home, write_file
from edgekit.common.proc import cpuinfo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

    Fact = TypeVar("Fact", bound=BaseModel)

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_MAX_FACT_BYTES = 1 << 20


@cache
def machine_key() -> str:
    """Return a key of this machine that changes with its CPU, OS or host name, but not with a restart."""
    parts = [
        platform.system(),
        platform.machine(),
        platform.node(),
        cpuinfo("model name", "Model") or platform.processor(),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def read_fact(artifact_sha256: str, name: str, kind: type[Fact]) -> Fact | None:
    """Return the measurement last written under `name`; None if there is none, or a field is out of its bounds."""
    data = _read(artifact_sha256, name)
    try:
        return None if data is None else kind.model_validate_json(data)
    except ValueError:
        return None


def write_fact(artifact_sha256: str, name: str, fact: BaseModel) -> bool:
    """Store a measurement. Returns False if the store cannot be written."""
    return _write(artifact_sha256, name, fact.model_dump_json().encode())


def is_marked(artifact_sha256: str, name: str, value: Mapping[str, Any]) -> bool:
    """Return True if the mark last written under `name` is this one, byte for byte."""
    return _read(artifact_sha256, name) == _text(value)


def mark(artifact_sha256: str, name: str, value: Mapping[str, Any]) -> bool:
    """Store a mark. Returns False if the store cannot be written."""
    return _write(artifact_sha256, name, _text(value))


def _text(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _read(artifact_sha256: str, name: str) -> bytes | None:
    path = _place(artifact_sha256, name)
    try:
        return path.read_bytes() if path.stat().st_size <= _MAX_FACT_BYTES else None
    except OSError:
        return None


def _write(artifact_sha256: str, name: str, data: bytes) -> bool:
    try:
        write_file(_place(artifact_sha256, name), data)
    except Exception:
        return False
    return True


def _place(artifact_sha256: str, name: str) -> Path:
    assert _NAME.fullmatch(name), name
    return home() / "facts" / artifact_sha256[:32] / machine_key() / f"{name}.json"
