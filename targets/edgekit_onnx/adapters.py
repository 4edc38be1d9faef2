"""LoRA adapters on packed integers: graphs with two more inputs for each adapted product, and their bound values.

The graph is derived from the audited one when the first adapter that needs it is loaded. It uses the same weights, so
its session takes little memory, and requests without an adapter run the exported graph. onnxruntime silently ignores
adapters set through its own API when inputs are bound, so edgekit binds these inputs itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import TargetFailed, vendor_errors
from edgekit.model.lora import LoraAdapter, LowRank
from edgekit.model.spec import ModelSpec
from edgekit_onnx.data_file import DATA_FILE
from edgekit_onnx.layout import with_nodes
from edgekit_onnx.loading import AuditedArtifact
from edgekit_onnx.memory import ADAPTED_LINEAR_BYTES, DERIVING_BYTES
from edgekit_onnx.product_kernels import PRODUCT

_PRODUCT = ".product"


class OnnxAdapter(NamedTuple):
    """One loaded adapter: the products that it changes, and the values that their inputs are bound to."""

    sha256: str
    sites: frozenset[str]
    values: Mapping[str, Any]  # input name → an OrtValue on the device
    bytes: int


def bind_adapter(
    model: ModelSpec,
    loaded: AuditedArtifact,
    adapter: LoraAdapter,
    known_sites: Collection[frozenset[str]],
    *,
    variants: int = 1,
) -> OnnxAdapter:
    """Copy an adapter's matrices to the device of the sessions.

    `known_sites`: the sites of all loaded adapters. An adapter with other sites needs new sessions. Its bytes include
    them, `variants` times, with their weights if sessions cannot share weights.
    """
    products = _products(model, adapter.modules, products_of([graph.data for graph in loaded.graphs.graphs]))
    sites = frozenset(products)
    arrays = {
        f"{site}.lora_{side}": np.ascontiguousarray(matrix.T, loaded.numbers)
        for site, part in products.items()
        for side, matrix in (("a", part.a), ("b", part.b))
    }
    taken = sum(array.nbytes for array in arrays.values())
    if sites not in known_sites:
        # A second session maps packed weights, and copies others.
        copied = 0 if loaded.graphs.hold else (loaded.graphs.folder / DATA_FILE).stat().st_size
        taken += variants * (len(adapter.modules) * ADAPTED_LINEAR_BYTES + copied)
    if not known_sites:
        taken += DERIVING_BYTES  # stays once it is imported
    with vendor_errors("onnx"):
        values = {name: loaded.graphs.bound(array) for name, array in arrays.items()}
    return OnnxAdapter(adapter.sha256, sites, values, taken)


def products_of(graphs: Iterable[bytes]) -> frozenset[str]:
    """Return the names of the products that an adapter may change."""
    import onnx

    return frozenset(
        node.name.removesuffix(_PRODUCT)
        for data in graphs
        for node in onnx.ModelProto.FromString(data).graph.node
        if _is_product(node)
    )


def with_inputs(data: bytes, sites: frozenset[str]) -> bytes:
    """Derive a graph with more inputs, `<product>.lora_a` [inputs, rank] and `<product>.lora_b` [rank, outputs]."""
    import onnx
    from onnx import helper

    model = onnx.ModelProto.FromString(data)
    graph, nodes = model.graph, []
    kinds = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    numbers = kinds.get("hidden_in") or next(
        value.type.tensor_type.elem_type for value in graph.output if value.name == "hidden"
    )
    for node in graph.node:
        site = node.name.removesuffix(_PRODUCT)
        nodes.append(node)
        if not _is_product(node) or site not in sites:
            continue
        low, added, total = f"{site}.lora.low", f"{site}.lora.added", node.output[0]
        node.output[0] = f"{site}.lora.base"
        rank = f"{site}.rank"
        for side, shape in (("a", [None, rank]), ("b", [rank, None])):
            graph.input.append(helper.make_tensor_value_info(f"{site}.lora_{side}", numbers, shape))
        nodes += [
            helper.make_node("MatMul", [node.input[0], f"{site}.lora_a"], [low], name=low),
            helper.make_node("MatMul", [low, f"{site}.lora_b"], [added], name=added),
            helper.make_node("Add", [node.output[0], added], [total], name=f"{site}.lora.sum"),
        ]
    return with_nodes(model, nodes)


def _is_product(node: Any) -> bool:
    return node.op_type in ("MatMulNBits", PRODUCT, "FusedMatMul") and node.name.endswith(_PRODUCT)


def _products(model: ModelSpec, modules: Mapping[str, LowRank], known: frozenset[str]) -> dict[str, LowRank]:
    """Map an adapter's modules to the graphs' products, which may join queries, keys and values."""
    products: dict[str, LowRank] = {}
    joined: dict[str, dict[str, LowRank]] = {}
    for module, part in modules.items():
        parent, _, last = module.rpartition(".")
        if module in known:
            products[module] = part
        elif last == "gate_up_proj":
            half = len(part.b) // 2
            products[f"{parent}.gate_proj"] = LowRank(part.a, part.b[:half])
            products[f"{parent}.up_proj"] = LowRank(part.a, part.b[half:])
        else:
            joined.setdefault(parent, {})[last] = part
    for parent, parts in joined.items():
        layer = model.layers[int(parent.removeprefix(f"{model.prefix}layers.").split(".")[0])]
        widths = list(model.qkv_widths(layer))
        products[f"{parent}.qkv_proj"] = _stacked([parts.get(f"{kind}_proj") for kind in "qkv"], widths)
    missing = sorted(set(products) - known)
    if missing:
        raise TargetFailed(f"onnx: the graphs have no product {missing[0]}; export the artifact again")
    return products


def _stacked(parts: Sequence[LowRank | None], widths: Sequence[int]) -> LowRank:
    """Join the changes of modules with the same inputs into one for the stacked matrix; ranks are concatenated."""
    a = np.concatenate([part.a for part in parts if part is not None])
    b: NDArray[np.float32] = np.zeros((sum(widths), len(a)), np.float32)
    row = rank = 0
    for part, width in zip(parts, widths, strict=True):
        if part is not None:
            b[row : row + width, rank : rank + len(part.a)] = part.b
            rank += len(part.a)
        row += width
    return LowRank(a, b)
