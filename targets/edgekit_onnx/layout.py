"""The files of an artifact as a function of its plan, for exporter, engine and audit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from edgekit.contracts.plan import Plan
from edgekit.model.spec import ModelSpec

# Tokens of padding that exact mode feeds; tables and caches have room for them.
SPARE_TOKENS = 2

HEAD = "head"  # the last norm and the logits
ENCODER = "encoder"  # the only graph of an encoder
MASKED = -10_000.0  # added to an encoder's scores outside a window or of padding; their exponentials are then zero
# Of the weights as the kernels hold them, with 32 bits a scale: 1.06 to 1.15 were measured, 1.0 to 1.1 in C++.
COPIED_SHARE = 1.2
SLICE_BYTES = 64 << 20  # of a head as kernels pack it, which opening copies at once
SINKS = 11  # index of the learnt logits, one per head, among the inputs of GroupQueryAttention
OFFSETS = ".offsets"  # ends the name of the node that adds to integer × scale, after the site of the product
LAYER_INPUTS = "layer_inputs.rows_of_table"  # the look-up of the inputs that layers have of their own


class GraphPart(NamedTuple):
    """Layers `start` to `stop` in one graph; an early exit may follow `stop`."""

    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"body-{self.start}-{self.stop}"


def parts_of(plan: Plan) -> list[GraphPart]:
    """The body, cut at every exit; none for an encoder."""
    if plan.model.encoder:
        return []
    cuts = [0, *sorted(set(plan.exits)), len(plan.model.layers)]
    return [GraphPart(start, stop) for start, stop in pairwise(cuts)]


def last_graph(plan: Plan) -> str:
    """The name of the graph that gives an artifact's results."""
    return ENCODER if plan.model.encoder else HEAD


def hidden_outputs(plan: Plan, part: GraphPart) -> list[int]:
    """Return the layers inside a part after which its graph also outputs hidden states."""
    asked = plan.drafter.hidden_layers if plan.drafter is not None else ()
    return sorted({layer for layer in asked if part.start < layer < part.stop})


def embedding_name(model: ModelSpec) -> str:
    """Return the node that gives the embeddings as the first layer reads them."""
    return "embedding" if model.embedding_scale == 1.0 else "embedding.scale"


def hidden_name(layer: int) -> str:
    return f"hidden.{layer}"


def attention_name(layer: int) -> str:
    return f"attention.{layer}"


def window_masks(model: ModelSpec) -> dict[str, int]:
    """Return the encoder's input names of masks for windows, with the tokens on either side that a window has."""
    return {f"mask.{layer.window}": layer.window for layer in model.layers if model.encoder and layer.window}


def set_cache_type(graph: Any, kind: int) -> None:
    """Give every cache input and output of an ONNX graph the element type `kind`."""
    for value in (*graph.input, *graph.output):
        if value.name.startswith(("past.", "present.")) and value.name.endswith((".key", ".value")):
            value.type.tensor_type.elem_type = kind


def with_nodes(model: Any, nodes: Iterable[Any]) -> bytes:
    """Return an ONNX model with other nodes, some of which may be its own."""
    copied = [type(node).FromString(node.SerializeToString()) for node in nodes]  # before its own are deleted
    del model.graph.node[:]
    model.graph.node.extend(copied)
    return bytes(model.SerializeToString())


def read_nodes(nodes: Sequence[Any], outputs: Iterable[str]) -> list[Any]:
    """Return the nodes of a sorted graph on which `outputs` depend, in their order."""
    read, kept = set(outputs), []
    for node in reversed(nodes):
        if not read.isdisjoint(node.output):
            read.update(node.input)
            kept.append(node)
    return kept[::-1]


def table_rows(plan: Plan) -> int:
    """Positions of the rotary tables: of a state, and of padding."""
    return plan.storage.capacity_tokens + SPARE_TOKENS
