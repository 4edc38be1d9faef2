"""API keys: hashed as soon as they are read, and compared in constant time. A key's name is its tenant."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from edgekit.common.parsing import read_bytes
from edgekit.errors import InvalidInput

_MAX_BYTES = 1 << 20
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
SHORTEST = 16  # characters of a key


class Key(NamedTuple):
    """One key: a name for logs, and the hash of the key itself."""

    name: str
    digest: bytes


class Keys:
    """The keys that a server accepts; without any, everyone is the tenant without a name."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, given: str) -> Key | None:
        """Return the key that a client sent. All keys are compared, so that the time taken reveals nothing."""
        digest, found = _digest(given), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def read_keys(path: Path) -> Keys:
    """Read a file of keys: a line is `NAME KEY` or `NAME sha256:HEX`; lines that begin with # are comments."""
    keys: dict[str, Key] = {}
    try:
        lines = read_bytes(path, _MAX_BYTES).decode().splitlines()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not text in UTF-8") from error
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{path}:{number}"
        if len(words) != 2:
            raise InvalidInput(f"{where}: must be a name and a key, with a space between them")
        name, secret = words
        if name in keys or len(name) > 64:
            raise InvalidInput(f"{where}: names must be unique and have at most 64 characters")
        hashed = _HASH.fullmatch(secret)
        if hashed is None and len(secret) < SHORTEST:
            raise InvalidInput(f"{where}: the key of {name} is shorter than {SHORTEST} characters; make a longer one")
        keys[name] = Key(name, bytes.fromhex(hashed[1]) if hashed else _digest(secret))
    if not keys:
        raise InvalidInput(f"{path}: holds no key; write a line with a name and a key")
    return Keys(keys.values())


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
