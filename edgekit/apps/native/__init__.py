"""The native library: opens artifacts of the onnx target in C++ and generates the texts of Python's runtime.

`edgekit_native.h` is its C API. `build` compiles it here; `library` calls it from Python.
"""

from __future__ import annotations
