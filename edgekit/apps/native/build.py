"""Compiles the library with the system's compiler, once for each version of its sources.

python -m edgekit.apps.native.build [--executorch]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from edgekit.common.content_store import ContentStore
from edgekit.common.files import home
from edgekit.errors import EdgekitError, TargetFailed, TargetMissing

SOURCES = Path(__file__).parent
_NAME = "libedgekit_native.dylib" if sys.platform == "darwin" else "libedgekit_native.so"
_TIMEOUT_S = 900


def missing() -> str | None:
    """The reason why nothing can be compiled here; None if it can."""
    if sys.platform == "win32":
        return "the native library is not built on Windows"
    absent = [name for name in ("cmake", os.environ.get("CXX", "c++")) if shutil.which(name) is None]
    return f"the native library needs {' and '.join(absent)}; install them" if absent else None


def build(*, sanitize: bool = False, executorch: Path | None = None) -> Path:
    """Return the compiled library, from edgekit's home or made now. Raises `TargetMissing` without a compiler.

    `sanitize` makes one that stops at memory errors and undefined behaviour; `executorch` is the folder of an installed
    ExecuTorch, to run its programs too.
    """
    reason = missing()
    if reason:
        raise TargetMissing(reason)
    options = _options(sanitize, executorch)
    key = _key(options)

    def make(folder: Path) -> None:
        run("cmake", "-S", SOURCES, "-B", folder / "build", *options)
        run("cmake", "--build", folder / "build", "--parallel", min(os.cpu_count() or 1, 8))
        if _key(options) != key:
            raise TargetFailed("native: the sources changed while they were compiled; compile them again")
        (folder / "build" / _NAME).rename(folder / _NAME)
        shutil.rmtree(folder / "build")

    return _store().get(key, make, check=lambda folder: None) / _NAME


def find_built(*, executorch: Path | None = None) -> Path | None:
    """Return the library that `build` made from these sources; None without one."""
    if missing() or not _store().root.is_dir():
        return None
    found = _store().root / _key(_options(False, executorch)) / _NAME
    return found if found.is_file() else None


def executorch_folder() -> Path:
    """Return the folder of the installed package, which is not imported. Raises `TargetMissing` without one."""
    found = find_spec("executorch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        return Path(folder)
    raise TargetMissing("executorch is not installed; pip install 'edgekit[executorch]'")


def _options(sanitize: bool, executorch: Path | None) -> list[str]:
    options = [f"-DSANITIZE={'ON' if sanitize else 'OFF'}"]
    if executorch is not None:
        options += ["-DEXECUTORCH=ON", f"-DCMAKE_PREFIX_PATH={executorch}"]
    return options


def _store() -> ContentStore:
    return ContentStore(home() / "native")


def _key(options: Sequence[str]) -> str:
    """A hash of the sources and of what compiles them."""
    digest = hashlib.sha256(f"{options} {os.environ.get('CXX')} {os.environ.get('CXXFLAGS')}".encode())
    digest.update(run(os.environ.get("CXX", "c++"), "--version").encode())
    if "-DEXECUTORCH=ON" in options:
        digest.update(version("executorch").encode())
    sources = [path for folder in ("src", "executorch") for path in (SOURCES / folder).iterdir()]
    for path in sorted([SOURCES / "CMakeLists.txt", SOURCES / "edgekit_native.h", *sources]):
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


def run(*command: object) -> str:
    """Run a tool of the compiler; return its output. Raises `TargetFailed` with the first error that it wrote."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        first = next((line for line in words if "error" in line.lower()), words[-1] if words else "")
        raise TargetFailed(f"native: {command[0]} failed: {first[:300]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executorch", action="store_true", help="run programs for phones too")
    given = parser.parse_args()
    sys.stdout.write(f"{build(executorch=executorch_folder() if given.executorch else None)}\n")


if __name__ == "__main__":
    try:
        main()
    except EdgekitError as error:
        sys.exit(f"edgekit: {error}")
