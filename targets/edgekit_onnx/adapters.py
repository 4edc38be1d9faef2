"""LoRA adapters beside the integers: graphs with two more inputs for each adapted product, and what is bound to them.

Such a graph is made from the one that was audited, when the first adapter that needs it is loaded. It points at the
same weights, so a second session takes hardly any memory. Whoever runs no adapter runs the graph as it was exported;
onnxruntime has a call for adapters: with bindings it is ignored without a word, so the inputs are bound here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.adapters import LowRank, read_adapter
from edgekit.errors import InvalidInput, TargetFailed, UnknownName, Unsupported, clip, vendor_errors
from edgekit.model import ModelSpec
from edgekit.plan import Plan
from edgekit_onnx.loading import Loaded

_PRODUCT = ".product"


class Adapted(NamedTuple):
    """One loaded adapter: the products that it changes, and the values that their inputs are bound to."""

    name: str
    sha256: str
    sites: frozenset[str]
    values: Mapping[str, Any]  # input → its OrtValue, on the device
    bytes: int


class Adapters:
    """The adapters of one engine."""

    def __init__(self, plan: Plan, loaded: Loaded) -> None:
        self._plan, self._loaded = plan, loaded
        self._by_name: dict[str, Adapted] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def names(self) -> list[str]:
        return sorted(self._by_name)

    @property
    def sites(self) -> set[frozenset[str]]:
        """What any of them changes."""
        return {adapted.sites for adapted in self._by_name.values()}

    def find(self, name: str | None) -> Adapted | None:
        """None where no adapter is asked for."""
        if name is None:
            return None
        if name not in self._by_name:
            raise UnknownName("adapter", name, self._by_name)
        return self._by_name[name]

    def load(self, name: str, files: Path) -> Adapted:
        """Read, check and make ready. What it takes counts the weights again where they cannot be shared."""
        if not self._plan.adapter_rank:
            raise Unsupported(
                f"onnx: adapter {clip(name)}: this artifact was exported without room for adapters; "
                "export it again with --adapter-rank (e.g. 16)"
            )
        if name in self._by_name:
            raise InvalidInput(f"adapter {clip(name)} is loaded already; drop it first")
        adapter = read_adapter(files, self._plan.model, most_rank=self._plan.adapter_rank)
        products = _products(self._plan.model, adapter.modules, products_of(self._loaded.graphs.read()))
        sites = frozenset(products)
        arrays = {
            f"{site}.lora_{side}": np.ascontiguousarray(matrix.T, self._loaded.numbers)
            for site, part in products.items()
            for side, matrix in (("a", part.a), ("b", part.b))
        }
        taken = sum(array.nbytes for array in arrays.values())
        is_new = all(other.sites != sites for other in self._by_name.values())
        if is_new and not self._loaded.graphs.shares_weights:
            taken += self._loaded.graphs.weight_bytes
        with vendor_errors("onnx"):
            values = {input_: self._loaded.graphs.bound(array) for input_, array in arrays.items()}
        found = Adapted(name, adapter.sha256, sites, values, taken)
        self._by_name[name] = found
        return found

    def drop(self, name: str) -> None:
        """Forget it."""
        del self._by_name[name]

    def close(self) -> None:
        self._by_name.clear()


def products_of(graphs: Iterable[bytes]) -> frozenset[str]:
    """The products of some graphs that an adapter may change."""
    import onnx

    found: set[str] = set()
    for data in graphs:
        for node in onnx.ModelProto.FromString(data).graph.node:
            if _is_product(node):
                found.add(node.name.removesuffix(_PRODUCT))
    return frozenset(found)


def with_inputs(data: bytes, sites: frozenset[str]) -> bytes:
    """The same graph with `<product>.lora_a` [inputs, rank] and `<product>.lora_b` [rank, outputs] as inputs too."""
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
        low, added, whole = f"{site}.lora.low", f"{site}.lora.added", node.output[0]
        node.output[0] = f"{site}.lora.base"
        rank = f"{site}.rank"
        for side, shape in (("a", [None, rank]), ("b", [rank, None])):
            graph.input.append(helper.make_tensor_value_info(f"{site}.lora_{side}", numbers, shape))
        nodes += [
            helper.make_node("MatMul", [node.input[0], f"{site}.lora_a"], [low], name=low),
            helper.make_node("MatMul", [low, f"{site}.lora_b"], [added], name=added),
            helper.make_node("Add", [node.output[0], added], [whole], name=f"{site}.lora.sum"),
        ]
    copied = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copied)
    found: bytes = model.SerializeToString()
    return found


def _is_product(node: Any) -> bool:
    return node.op_type in ("MatMulNBits", "FusedMatMul") and node.name.endswith(_PRODUCT)


def _products(model: ModelSpec, modules: Mapping[str, LowRank], known: frozenset[str]) -> dict[str, LowRank]:
    """The same changes by the products of the graphs, where queries, keys and values may stand in one."""
    found: dict[str, LowRank] = {}
    joined: dict[str, dict[str, LowRank]] = {}
    for module, part in modules.items():
        place, _, last = module.rpartition(".")
        if module in known:
            found[module] = part
        elif last == "gate_up_proj":
            half = len(part.b) // 2
            found[f"{place}.gate_proj"] = LowRank(part.a, part.b[:half])
            found[f"{place}.up_proj"] = LowRank(part.a, part.b[half:])
        else:
            joined.setdefault(place, {})[last] = part
    for place, parts in joined.items():
        layer = model.layers[int(place.removeprefix(f"{model.prefix}layers.").split(".")[0])]
        widths = [model.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.kv_heads * layer.head_dim]
        found[f"{place}.qkv_proj"] = _stacked([parts.get(f"{kind}_proj") for kind in "qkv"], widths)
    missing = sorted(set(found) - known)
    if missing:
        raise TargetFailed(f"onnx: the graphs have no product {missing[0]}; export the artifact again")
    return found


def _stacked(parts: Sequence[LowRank | None], widths: Sequence[int]) -> LowRank:
    """Several changes of the same inputs as one: their ranks stand one after the other."""
    held = [part for part in parts if part is not None]
    a = np.concatenate([part.a for part in held])
    b: NDArray[np.float32] = np.zeros((sum(widths), len(a)), np.float32)
    row = rank = 0
    for part, width in zip(parts, widths, strict=True):
        if part is not None:
            b[row : row + width, rank : rank + len(part.a)] = part.b
            rank += len(part.a)
        row += width
    return LowRank(a, b)
