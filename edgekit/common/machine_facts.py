"""A store of measurements of artifacts on this machine, keyed by artifact hash and machine.

Facts can be measured again, so an unreadable or read-only store is not an error.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any

from edgekit.common.files import home, write_file
from edgekit.common.proc import cpuinfo

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


def read_fact(artifact_sha256: str, name: str) -> dict[str, Any] | None:
    """Return the fact last written under `name`; None if there is none or it cannot be read."""
    path = _place(artifact_sha256, name)
    try:
        if path.stat().st_size > _MAX_FACT_BYTES:
            return None
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def write_fact(artifact_sha256: str, name: str, value: dict[str, Any]) -> bool:
    """Store a fact. Returns False if the store cannot be written."""
    try:
        write_file(_place(artifact_sha256, name), json.dumps(value, sort_keys=True).encode())
    except Exception:
        return False
    return True


def _place(artifact_sha256: str, name: str) -> Path:
    assert _NAME.fullmatch(name), name
    return home() / "facts" / artifact_sha256[:32] / machine_key() / f"{name}.json"
