"""Makes the wheel edgekit-native, which has the compiled library and nothing else.

python -m edgekit.apps.native.wheel [--out dist] [--machine x86_64|aarch64] [--compiler COMMAND]

The tag names the oldest C library whose systems have every symbol that the compiled file needs, those of the C++
library too; `auditwheel show` finds the same.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import platform
import re
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

from edgekit.apps.native.build import SOURCES, run
from edgekit.apps.native.loop import PACKAGE
from edgekit.errors import EdgekitError, TargetFailed

MOST_BYTES = 1_500_000
_SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6"}
# By the last GLIBCXX_3.4.N: N of the glibc 2.N of manylinux whose systems have it; the first is manylinux2014.
_GLIBC_OF_GLIBCXX = {19: 17, 22: 24, 24: 27, 28: 31, 29: 34, 30: 35, 33: 39}
_COMPILERS = {"x86_64": "x86_64-linux-gnu-g++", "aarch64": "aarch64-linux-gnu-g++"}


def make_wheel(out: Path, machine: str, compiler: str | None = None) -> Path:
    """Compile the library for Linux on `machine` and pack it. Raises `TargetFailed` where the result is no wheel."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        build = Path(temporary)
        run(
            "cmake", "-S", SOURCES, "-B", build, "-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={machine}",
            f"-DCMAKE_CXX_COMPILER={compiler or _COMPILERS[machine]}", "-DCMAKE_SHARED_LINKER_FLAGS=-s",
        )  # fmt: skip
        run("cmake", "--build", build, "--parallel", os.cpu_count() or 1)
        library = build / "libedgekit_native.so"
        size = library.stat().st_size
        if size > MOST_BYTES:
            raise TargetFailed(f"native: the library has {size:,} bytes; at most {MOST_BYTES:,} are meant")
        tag = f"py3-none-manylinux_2_{oldest_glibc(library)}_{machine}"
        return pack(library, out, tag)


def oldest_glibc(library: Path) -> int:
    """Return N of the oldest glibc 2.N whose systems have every symbol. Refuses what needs further libraries."""
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\]", run("readelf", "--dynamic", "--wide", library)))
    loaders = {name for name in needed if name.startswith("ld-linux")}
    if more := needed - loaders - _SYSTEM_LIBRARIES:
        raise TargetFailed(f"native: the library needs {', '.join(sorted(more))}, which not every Linux has")
    versions = run("readelf", "--version-info", "--wide", library)
    symbols = max(map(int, re.findall(r"Name: GLIBCXX_3\.4\.(\d+)", versions)), default=0)
    systems = [system for last, system in _GLIBC_OF_GLIBCXX.items() if last >= symbols]
    if not systems:
        raise TargetFailed(f"native: the library needs GLIBCXX_3.4.{symbols}; compile it with an older compiler")
    return max(systems[0], *map(int, re.findall(r"Name: GLIBC_2\.(\d+)", versions)))


def pack(library: Path, out: Path, tag: str) -> Path:
    """Write the wheel of a compiled library; the same library makes the same wheel."""
    release = version("edgekit")
    facts = f"edgekit_native-{release}.dist-info"
    contents = {
        f"{PACKAGE}/__init__.py": b'"""edgekit\'s native library; edgekit finds and loads it."""\n',
        f"{PACKAGE}/{library.name}": library.read_bytes(),
        f"{PACKAGE}/edgekit_native.h": (SOURCES / "edgekit_native.h").read_bytes(),
        f"{facts}/METADATA": (
            f"Metadata-Version: 2.1\nName: edgekit-native\nVersion: {release}\nSummary: edgekit's native library\n"
            f"License: Apache-2.0\nRequires-Python: >=3.11\nRequires-Dist: edgekit=={release}\n"
        ).encode(),
        f"{facts}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: edgekit ({release})\nRoot-Is-Purelib: false\nTag: {tag}\n"
        ).encode(),
    }
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in contents.items())
    contents[f"{facts}/RECORD"] = f"{record}{facts}/RECORD,,\n".encode()
    wheel = out / f"edgekit_native-{release}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name)  # of 1980: the same files make the same wheel
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    return wheel


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--machine", choices=sorted(_COMPILERS), default=platform.machine())
    parser.add_argument("--compiler", help="without it, the compiler of Debian for the machine")
    chosen = parser.parse_args()
    try:
        sys.stdout.write(f"{make_wheel(chosen.out, chosen.machine, chosen.compiler)}\n")
    except EdgekitError as error:
        sys.stderr.write(f"edgekit: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
