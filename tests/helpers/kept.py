"""Folders that tests fill once for each machine and version of what makes them: exports, and models in floats."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What an export reads, besides its target.
EXPORTS = tuple(f"edgekit/{part}" for part in ("common", "contracts", "enginekit", "formats", "model", "quant"))
VENDORS = ("torch", "transformers", "onnx", "onnxruntime", "mlx", "mlx-lm", "executorch", "torchao", "xllamacpp")
HEAVY_MODULES = {name.replace("-", "_") for name in VENDORS} | {"onnx_ir", "llama_cpp", "optimum", "scipy"}
# Read before tests change the environment; it holds what other sources made until a day has passed.
_PLACE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgekit-tests"
_A_DAY_S = 24 * 3600
KINDS = (".py", ".cpp", ".h", ".txt", ".cmake")


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@cache
def _hash_of(sources: tuple[str, ...]) -> str:
    """The hash of the sources in these folders, of the helpers that make models, and of the vendors' versions."""
    seen = sha256(" ".join(map(_version_of, VENDORS)).encode())
    paths = [path for part in sources for path in (ROOT / part).rglob("*") if path.suffix in KINDS]
    for path in sorted([*paths, *(ROOT / "tests/helpers" / name for name in ("engines.py", "family_models.py"))]):
        seen.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return seen.hexdigest()


@cache
def _drop_old_ones() -> None:
    """Drop what no test of the last day has used."""
    _PLACE.mkdir(parents=True, exist_ok=True)
    for place in _PLACE.iterdir():
        with suppress(OSError):  # another process drops it too
            if time.time() - place.stat().st_mtime > _A_DAY_S:
                shutil.rmtree(place) if place.is_dir() else place.unlink()


def kept(make: Callable[[Path], None], sources: tuple[str, ...], *key: str) -> Path:
    """A folder that `make` fills unless it is there; other processes wait for it. No test may change it.

    `sources` are the folders whose code decides what it holds, and `key` all that `make` depends on besides.
    """
    _drop_old_ones()
    place = _PLACE / sha256("\0".join((_hash_of(sources), *key)).encode()).hexdigest()[:32]
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=_PLACE) as folder, (_PLACE / f".{place.name}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                make(made := Path(folder, "made"))
                made.rename(place)
    os.utime(place)
    return place
