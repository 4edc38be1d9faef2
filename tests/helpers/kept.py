"""Folders that tests fill once for each machine and version of the sources: exports, and models in floats."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENDORS = ("torch", "transformers", "onnx", "onnxruntime", "mlx", "mlx-lm", "executorch", "torchao", "xllamacpp")
_CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgekit-tests"  # before tests change them
_A_DAY_S = 24 * 3600


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@cache
def kept_folder() -> Path:
    """The folder of these sources and vendors; those of others go after a day."""
    seen = sha256(" ".join(map(_version_of, VENDORS)).encode())
    for part in ("edgekit", "targets", "tests/helpers"):
        for path in sorted(path for kind in ("*.py", "*.cpp", "*.h", "*.txt") for path in (ROOT / part).rglob(kind)):
            seen.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    place = Path(os.environ.get("EDGEKIT_TEST_EXPORTS") or _CACHES) / seen.hexdigest()[:24]
    if not place.exists():
        place.mkdir(parents=True, exist_ok=True)
        for other in place.parent.iterdir():
            if time.time() - other.stat().st_mtime > _A_DAY_S:
                shutil.rmtree(other, ignore_errors=True)
    return place


def kept(make: Callable[[Path], None], *key: str) -> Path:
    """A folder that `make` fills unless it is there; other processes wait for it. No test may change it.

    `key` is all that `make` depends on besides the sources.
    """
    place = kept_folder() / sha256("\0".join(key).encode()).hexdigest()[:32]
    if not place.exists():
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                with tempfile.TemporaryDirectory(dir=place.parent) as folder:
                    make(made := Path(folder, "made"))
                    made.rename(place)
    return place
