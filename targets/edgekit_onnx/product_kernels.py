"""edgekit's own products and attention for x86-64 processors, where their library was compiled (`make kernels`).

They compute what onnxruntime's MatMulNBits computes at its fast accuracy, and its GroupQueryAttention, on onnxruntime's
threads. A row has the same bits alone and among others. Graphs are changed when they are opened; artifacts stay.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.common.environment import environment_choice
from edgekit_onnx.layout import OFFSETS, read_nodes, with_nodes

SETTING = "EDGEKIT_KERNELS"  # off: onnxruntime's own operators, for comparisons
_LIBRARY = Path(__file__).parent / "kernels" / "build" / "libedgekit_kernels.so"
PRODUCT, DOMAIN = "Product", "edgekit"
OFFSETS_INPUT = 6  # index of what is added to the weights of each block
VERSION = "kernels of edgekit, 4"  # raise it with every change of the bytes that they read, or of their results
_FAST = 4  # accuracy level of products that round activations to 8 bits
_BLOCKS, _INPUTS = (16, 32, 64, 128), OFFSETS_INPUT + 1  # of a product
# Operators whose rows may depend on the number of rows in a call. Norms and functions of single numbers do not: a test
# of theirs on x86-64 found no other bit in any of 1 to 13 rows, on 1 to 3 threads.
_DEPENDENT = ("FusedMatMul", "LinearAttention", "MatMulNBits", "MoE", "MultiHeadAttention", "QMoE")


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


def with_kernels(data: bytes, *, gated: bool = False) -> bytes:
    """Return the graph with edgekit's operators in place of those that they compute alike; `gated`: with gates."""
    import onnx
    from onnx import helper

    model = onnx.ModelProto.FromString(data)
    for node in model.graph.node:
        options = {attribute.name: attribute.i for attribute in node.attribute}
        is_alike = options.get("block_size") in _BLOCKS and options.get("accuracy_level") == _FAST
        if node.op_type == "MatMulNBits" and is_alike:
            node.domain, node.op_type = DOMAIN, PRODUCT
        elif node.op_type == "GroupQueryAttention":
            node.domain = DOMAIN
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    changed = with_nodes(model, _with_offsets(model.graph))
    return with_gates(changed) if gated else changed


def _with_offsets(graph: Any) -> list[Any]:
    """Return the nodes; products add their blocks' minima themselves, instead of by a `FusedMatMul` and an `Add`."""
    makers: dict[str, Any] = {name: node for node in graph.node for name in node.output}
    moved = set()
    for node in graph.node:
        makes: list[Any] = [makers.get(name) for name in node.input]
        if node.op_type != "Add" or [each and each.op_type for each in makes] != [PRODUCT, "FusedMatMul"]:
            continue
        product, added = makes
        stored = makers.get(added.input[1])
        if added.name.endswith(OFFSETS) and stored is not None and stored.op_type == "Cast":
            product.input.extend([*[""] * (OFFSETS_INPUT - len(product.input)), stored.input[0]])
            product.output[0] = node.output[0]
            moved |= {id(node), id(added)}
    left = [node for node in graph.node if id(node) not in moved]
    return read_nodes(left, [output.name for output in graph.output])


def with_gates(data: bytes) -> bytes:
    """Return the graph with one operator for two products of the same rows, where the silu of one gates the other."""
    import onnx

    model = onnx.ModelProto.FromString(data)
    makers: dict[str, Any] = {node.output[0]: node for node in model.graph.node}
    users = Counter(name for node in model.graph.node for name in node.input)
    for node in (node for node in makers.copy().values() if node.op_type == "Mul"):
        silu, up = (makers.get(name, node) for name in node.input)
        is_silu = silu.op_type == "QuickGelu" and [each.f for each in silu.attribute] == [1.0]
        gate = makers.get(silu.input[0], node) if is_silu else node
        if not gate.op_type == up.op_type == PRODUCT or any(users[part.output[0]] > 1 for part in (gate, silu, up)):
            continue
        if gate.attribute == up.attribute and gate.input[0] == up.input[0]:
            node.op_type, node.domain = "GatedProduct", DOMAIN
            node.input[:] = [*gate.input, *[""] * (_INPUTS - len(gate.input)), *up.input[1:]]
            node.attribute.extend(gate.attribute)
            for part in (gate, silu, up):
                del makers[part.output[0]]
    return with_nodes(model, makers.values())


def rows_are_alone(data: bytes) -> bool:
    """Return True if no row of a call changes a bit of another row's results in this graph, which passed the audit."""
    # The field 4 of a node is the operator: its tag, the length and the letters.
    return not any(b'"%c%b' % (len(name), name.encode()) in data for name in _DEPENDENT)
