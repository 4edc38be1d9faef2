"""The variants of a body's sessions: as exported, with another cache width, an adapter or outputs of attention.

A variant is derived from the audited graphs when the first state needs it, and uses the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from edgekit.errors import vendor_errors
from edgekit_onnx.adapters import OnnxAdapter, with_inputs
from edgekit_onnx.float16_kv import BITS as HALF_BITS
from edgekit_onnx.int8_kv import BITS, Steps, inputs_of
from edgekit_onnx.layout import GraphPart, attention_name, with_nodes
from edgekit_onnx.loading import Graphs

_KIND, _AFTER_SOFTMAX = "qk_output", 2  # the attribute that asks for weights
_OUTPUTS = 4  # of attention: output, keys, values, weights
_QUERIES = "attention.queries"

Change = Callable[[bytes], bytes]
Sessions = tuple[tuple[GraphPart, Any], ...]


class Variant(NamedTuple):
    """The differences of a variant from the exported graphs."""

    kv_bits: int
    sites: frozenset[str]  # products that an adapter changes
    attends: bool = False  # also gives attention's weights


class StateSessions(NamedTuple):
    """The sessions that run a state, and the constant inputs of each part."""

    variant: Variant
    sessions: Sessions
    inputs: tuple[tuple[tuple[str, Any], ...], ...]


class SessionVariants:
    """Opens each variant when it is first needed, and keeps it until it is dropped.

    `by_width`: cache width → the function that derives its graphs; other widths use the exported graphs.
    """

    def __init__(self, graphs: Graphs, by_width: Mapping[int, Change], steps: Steps | None) -> None:
        self._graphs, self._by_width = graphs, by_width
        self._steps = {name: graphs.bound(array) for name, array in inputs_of(steps)} if steps else {}
        self._open: dict[Variant, Sessions] = {}

    def running(self, kv_bits: int, adapter: OnnxAdapter | None, *, attends: bool = False) -> StateSessions:
        """Return the sessions and constant inputs for a cache width and an adapter."""
        variant = Variant(kv_bits, adapter.sites if adapter else frozenset(), attends)
        values = {**(self._steps if kv_bits == BITS else {}), **(adapter.values if adapter else {})}
        sessions = self.sessions(variant)
        inputs = tuple(
            tuple((value.name, values[value.name]) for value in session.get_inputs() if value.name in values)
            for _, session in sessions
        )
        return StateSessions(variant, sessions, inputs)

    def sessions(self, variant: Variant) -> Sessions:
        if variant not in self._open:
            with_width = self._by_width.get(variant.kv_bits)

            def change(data: bytes) -> bytes:
                data = with_inputs(data, variant.sites) if variant.sites else data
                data = with_attention(data) if variant.attends else data
                return with_width(data) if with_width else data

            with vendor_errors("onnx"):
                packed_for = self._graphs.plan.storage.kv_bits if self._graphs.hold else None
                halves = variant == Variant(HALF_BITS, frozenset()) and packed_for == HALF_BITS
                self._open[variant] = self._graphs.open(
                    None if halves else change, in_order=variant.attends, halves=halves
                )
        return self._open[variant]

    def drop(self, is_unused: Callable[[Variant], bool]) -> None:
        self._open = {variant: sessions for variant, sessions in self._open.items() if not is_unused(variant)}

    def close(self) -> None:
        self._open.clear()
        self._steps.clear()


def with_attention(data: bytes) -> bytes:
    """Derive a graph with an output `attention.<layer>` [sequence, head, token] for every layer with its own cache.

    Weights are summed over the queries of a call. The derived graph has a float32 cache; `with_halves` may follow.
    """
    import onnx
    from onnx import TensorProto, helper

    model = onnx.ModelProto.FromString(data)
    graph, nodes = model.graph, []
    graph.initializer.append(helper.make_tensor(_QUERIES, TensorProto.INT64, [1], [2]))
    for node in graph.node:
        nodes.append(node)
        if node.op_type != "GroupQueryAttention":
            continue
        layer = node.output[1].split(".")[1]
        if f"past.{layer}.key" not in node.input:
            continue  # it reads the cache of another layer
        name, node.domain = attention_name(int(layer)), "com.microsoft"  # edgekit's operator gives no weights
        node.output.extend([""] * (_OUTPUTS - 1 - len(node.output)) + [f"{name}.weights"])
        others = [attribute for attribute in node.attribute if attribute.name != _KIND]
        del node.attribute[:]
        node.attribute.extend([*others, helper.make_attribute(_KIND, _AFTER_SOFTMAX)])
        nodes += [
            helper.make_node("Cast", [f"{name}.weights"], [f"{name}.wide"], name=f"{name}.wide", to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", [f"{name}.wide", _QUERIES], [name], name=name, keepdims=0),
        ]
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None, None]))
    return with_nodes(model, nodes)
