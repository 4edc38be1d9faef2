"""Calls the native library's audit and change of graphs alone, without a runtime that reads them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from edgekit.apps.native.build import SOURCES, run
from edgekit.errors import InvalidInput

Narrow = Callable[[bytes, int], bytes]
_SPARE_BYTES = 1 << 20
_SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]


def compiled(folder: Path) -> Narrow:
    """Compile it into `folder`; the function takes a graph and a cache width, and raises `InvalidInput`."""
    path = folder / "libnarrow.so"
    parts = [SOURCES / f"src/{name}.cpp" for name in ("graph_audit", "narrow_graph", "protobuf")]
    sources = [*parts, Path(__file__).with_name("narrow_library.cpp")]
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", *(_SANITIZED if "NATIVE_SANITIZE" in os.environ else [])]
    run(os.environ.get("CXX", "c++"), *flags, f"-I{SOURCES / 'src'}", *sources, "-o", path)
    function = ctypes.CDLL(str(path)).narrow
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]

    def narrow(graph: bytes, bits: int) -> bytes:
        out = ctypes.create_string_buffer(2 * len(graph) + _SPARE_BYTES)
        size = function(graph, len(graph), bits, out, len(out))
        if size < 0:
            raise InvalidInput(out.value.decode())
        assert size <= len(out)
        return out.raw[:size]

    return narrow
