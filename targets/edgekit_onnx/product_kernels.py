"""edgekit's own products of packed weights for x86-64 processors, where their library was compiled (`make kernels`).

They compute what onnxruntime's MatMulNBits computes at its fast accuracy, on onnxruntime's threads. A row has the same
bits alone and among others. Graphs are changed in memory when they are opened; artifacts stay as they are.
"""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from edgekit.common.environment import environment_choice

SETTING = "EDGEKIT_KERNELS"  # off: onnxruntime's own operators, for comparisons
_LIBRARY = Path(__file__).parent / "kernels" / "build" / "libedgekit_kernels.so"
PRODUCT, _DOMAIN = "Product", "edgekit"
_FAST = 4  # accuracy level of products that round activations to 8 bits
_BLOCKS = (16, 32, 64, 128)


class ProductKernels(NamedTuple):
    """The loaded library."""

    library: Path
    path: str  # the instructions that it uses here
    sha256: str


def product_kernels() -> ProductKernels | None:
    """Return the library that serves this process; None where onnxruntime's own operators do."""
    return None if environment_choice(SETTING, "on", "off") == "off" else _loaded()


@cache
def _loaded() -> ProductKernels | None:
    """Load the library once; it stays, since sessions use it until the process ends."""
    try:
        name = ctypes.CDLL(str(_LIBRARY)).edgekit_kernels_path
    except (OSError, AttributeError):
        return None
    name.argtypes, name.restype = [ctypes.c_char_p], ctypes.c_char_p
    path = (name(b"") or b"plain").decode()
    if path == "plain":  # slower than onnxruntime's
        return None
    return ProductKernels(_LIBRARY, path, hashlib.sha256(_LIBRARY.read_bytes()).hexdigest())


def with_products(data: bytes) -> bytes:
    """Return the graph with edgekit's operator in place of every MatMulNBits that it computes alike."""
    import onnx
    from onnx import helper

    model = onnx.ModelProto.FromString(data)
    for node in model.graph.node:
        options = {attribute.name: attribute.i for attribute in node.attribute}
        is_alike = options.get("block_size") in _BLOCKS and options.get("accuracy_level") == _FAST
        if node.op_type == "MatMulNBits" and is_alike:
            node.domain, node.op_type = _DOMAIN, PRODUCT
    model.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    changed: bytes = model.SerializeToString()
    return changed
