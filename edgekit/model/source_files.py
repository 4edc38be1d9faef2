"""The source files of neutral weights: hashes of all, and copies of tokenizer, chat template and licence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from edgekit.common.files import disk_full, file_sha256, home, write_file
from edgekit.common.parsing import MAX_TEXT_BYTES, read_bytes
from edgekit.errors import InvalidInput

# Files copied with the weights. Python files never are: edgekit does not run a model's own code.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
)
_MAX_COMPANION_BYTES = 64 << 20


def companions(folder: Path) -> list[Path]:
    """Return the files of a model that `COMPANIONS` lists, in that order."""
    present = [folder / name for name in COMPANIONS if (folder / name).is_file()]
    for path in present:
        if path.stat().st_size > _MAX_COMPANION_BYTES:
            raise InvalidInput(f"{path}: {path.stat().st_size:,} bytes; at most {_MAX_COMPANION_BYTES:,} are allowed")
    return present


def source_hashes(folder: Path, weights: Iterable[Path]) -> dict[str, str]:
    """Return the hash of every file that neutral weights depend on; an unchanged file is not read again."""
    files = [folder / "config.json", *companions(folder), *weights]
    return {path.name: _remembered_hash(path) for path in files}


def _remembered_hash(path: Path) -> str:
    info = path.stat()
    if info.st_size <= MAX_TEXT_BYTES:
        return file_sha256(path)
    mark = [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, info.st_dev]
    memory = home() / "hashes" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()}.json"
    try:
        known = json.loads(memory.read_bytes())
        if known["mark"] == mark:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # unknown or unreadable: hash the file again
    sha256 = file_sha256(path)
    try:
        write_file(memory, json.dumps({"mark": mark, "sha256": sha256}).encode())
    except Exception:
        return sha256
    return sha256


def copy_companions(source: Path, out: Path) -> None:
    """Copy the files that `companions` returns."""
    for path in companions(source):
        data = read_bytes(path, _MAX_COMPANION_BYTES)
        with disk_full(out / path.name, len(data)):
            write_file(out / path.name, data)
