"""Cached prefixes on disk: one private file, read only if it belongs to the user and is undamaged.

Runs of adapters are not written, because another adapter may have the same name after a restart.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from edgekit.common.files import disk_full, sync_folder
from edgekit.common.parsing import parse_json
from edgekit.errors import DamagedArtifact, InvalidInput, quote_short
from edgekit.runtime.prefix_cache.tree import PrefixKey

if TYPE_CHECKING:
    from edgekit.contracts.engine import Engine
    from edgekit.runtime.prefix_cache.tree import Prefixes

_MAGIC = b"edgekit prefixes 1\n"
_MAX_HEADER_BYTES = 64 << 20
_SIZE = struct.Struct("<Q")


def save(path: Path, prefixes: Prefixes, identity: str) -> int:
    """Write every run to a file that only its owner can read, atomically; return the number of runs."""
    runs: list[dict[str, Any]] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_full(path, prefixes.bytes), tempfile.TemporaryDirectory(prefix=".prefixes.", dir=path.parent) as folder:
        body, one = Path(folder, "body"), Path(folder, "one")
        with body.open("wb") as all_runs:
            for key, tokens, segment in prefixes.runs():
                if key.adapter is not None:
                    continue
                segment.write(one)
                data = one.read_bytes()
                all_runs.write(data)
                digest = hashlib.sha256(data).hexdigest()
                runs.append({"key": key[::2], "tokens": tokens, "bytes": len(data), "sha256": digest})
        header = json.dumps({"artifact": identity, "runs": runs}).encode()
        handle, name = tempfile.mkstemp(dir=folder)  # its mode is 0600
        with os.fdopen(handle, "wb") as file, body.open("rb") as source:
            file.write(_MAGIC + _SIZE.pack(len(header)) + header)
            while block := source.read(1 << 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    sync_folder(path.parent)
    return len(runs)


def load(path: Path, prefixes: Prefixes, engine: Engine, identity: str) -> int:
    """Insert the runs of a file from `save` while there is room; return the number of inserted runs."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        runs = _header(path, file, size, identity, engine.capabilities.vocabulary)
        start, kept = file.tell(), 0
        for run in runs:
            if hashlib.sha256(file.read(run["bytes"])).hexdigest() != run["sha256"]:
                raise DamagedArtifact(f"{path}: is damaged, its hash is not the stored one; remove it")
        file.seek(start)
        with tempfile.TemporaryDirectory(prefix="edgekit-prefixes-") as folder:
            one = Path(folder, "one")
            for run in runs:
                one.write_bytes(file.read(run["bytes"]))
                tenant, kv_bits = run["key"]
                kept += prefixes.insert(PrefixKey(tenant, None, kv_bits), run["tokens"], engine.read_segment(one))
    return kept


def _opened(path: Path) -> BinaryIO:
    """Open a regular file of this user that nobody else may write. Links are not followed."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be opened: {error.strerror}; a link is not followed") from error
    status = os.fstat(handle)
    is_own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    if not stat.S_ISREG(status.st_mode) or not is_own or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(handle)
        raise InvalidInput(f"{path}: must be a file of yours that nobody else may write; remove it, or chmod 600")
    return os.fdopen(handle, "rb")


def _header(path: Path, file: BinaryIO, size: int, identity: str, vocabulary: int) -> list[dict[str, Any]]:
    start = file.read(len(_MAGIC) + _SIZE.size)
    if len(start) < len(_MAGIC) + _SIZE.size or not start.startswith(_MAGIC):
        raise InvalidInput(f"{path}: is not a file of saved prefixes of this edgekit; remove it")
    (length,) = _SIZE.unpack(start[len(_MAGIC) :])
    if length > min(_MAX_HEADER_BYTES, size):
        raise DamagedArtifact(f"{path}: claims a header of {length:,} bytes; remove it")
    header = parse_json(file.read(length), str(path))
    if header.get("artifact") != identity:
        raise InvalidInput(f"{path}: was saved by another artifact ({quote_short(header.get('artifact'))}); remove it")
    runs = header.get("runs")
    if not isinstance(runs, list) or not all(_is_run(run, vocabulary) for run in runs):
        raise DamagedArtifact(f"{path}: its list of prefixes is not as edgekit writes it; remove it")
    if sum(run["bytes"] for run in runs) != size - file.tell():
        raise DamagedArtifact(f"{path}: is cut short or too long; remove it")
    return runs


def _is_run(run: Any, vocabulary: int) -> bool:
    if not isinstance(run, dict) or set(run) != {"key", "tokens", "bytes", "sha256"}:
        return False
    key, tokens = run["key"], run["tokens"]
    return (
        isinstance(key, list)
        and [type(part) for part in key] == [str, int]
        and isinstance(tokens, list)
        and len(tokens) > 0
        and all(type(token) is int and 0 <= token < vocabulary for token in tokens)
        and type(run["bytes"]) is int
        and run["bytes"] >= 0
    )
