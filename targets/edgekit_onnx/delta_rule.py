"""The gated delta rule (Qwen3.5) as ONNX operators around onnxruntime's `LinearAttention`.

That operator gives the same bits for a text in one call or in several, even with empty calls. So each call is split
after the first `kept` tokens, and the graph returns the memory between both pieces.
"""

from __future__ import annotations

import onnx_ir as ir

from edgekit.model.parts import DeltaRule
from edgekit.model.spec import ModelSpec
from edgekit.quant.delta_rule import UNIT_EPSILON
from edgekit_onnx.convolution import FLOAT, INT64
from edgekit_onnx.graph import MICROSOFT, Graph, GraphShape
from edgekit_onnx.packing import OnnxPacking


def write_delta_rule(
    graph: Graph,
    packing: OnnxPacking,
    model: ModelSpec,
    index: int,
    mixed: ir.Value,
    decay: ir.Value,
    strength: ir.Value,
) -> ir.Value:
    """Write the normalised values that queries read from the memory of layer `index`, which is its recurrent part.

    `mixed` are queries, keys and values.
    """
    rule, name = model.layers[index].delta_rule, f"{model.prefix}layers.{index}.linear_attn"
    assert rule is not None, "the layer has a delta rule"

    def stored(part: str, size: int) -> ir.Value:
        return graph.stored(f"{name}.{part}", FLOAT, [size], packing.vector(f"{name}.{part}"))

    strength = graph.op("Sigmoid", strength, name=f"{name}.strength")
    rate = graph.op("Add", decay, stored("dt_bias", rule.value_heads), name=f"{name}.dt")
    rate = _softplus(graph, rate, f"{name}.rate")
    least = graph.op("Neg", graph.op("Exp", stored("A_log", rule.value_heads), name=f"{name}.A"), name=f"{name}.least")
    decay = graph.op("Mul", rate, least, name=f"{name}.decay")
    read = _read(graph, name, index, rule, [*_parts(graph, name, rule, mixed), decay, strength])
    by_head = graph.reshaped(read, f"{name}.by_head", rule.value_heads, rule.value_dim)
    normed = graph.norm(by_head, stored("norm.weight", rule.value_dim), model.norm_epsilon, f"{name}.norm")
    return graph.reshaped(normed, f"{name}.normed", rule.values)


def _softplus(graph: Graph, x: ir.Value, name: str) -> ir.Value:
    """Write softplus as log(exp(0) + exp(x)).

    onnxruntime's own operator computes the last values of an array differently, so results would depend on chunks.
    """
    axis = graph.constant("axis.last", [-1], INT64)
    alone = graph.op("Unsqueeze", x, axis, name=f"{name}.alone")
    pair = graph.op("Concat", alone, graph.op("Sub", alone, alone, name=f"{name}.zero"), name=f"{name}.pair", axis=-1)
    return graph.op("ReduceLogSumExp", pair, axis, name=name, keepdims=0)


def _parts(graph: Graph, name: str, rule: DeltaRule, mixed: ir.Value) -> list[ir.Value]:
    """Return queries, keys and values; each head's query and key is normalised to length 1."""
    sizes = graph.constant(f"{name}.sizes", [2 * rule.keys, rule.values], INT64)
    both, values = graph.ops("Split", mixed, sizes, outputs=2, name=f"{name}.parts", axis=-1)
    # An RMS norm whose weight turns the mean of squares into their sum.
    weight = graph.constant(f"unit.{rule.key_dim}", [rule.key_dim**-0.5] * rule.key_dim, FLOAT)
    by_head = graph.reshaped(both, f"{name}.keys_by_head", 2 * rule.key_heads, rule.key_dim)
    unit = graph.norm(by_head, weight, UNIT_EPSILON / rule.key_dim, f"{name}.unit")
    unit = graph.reshaped(unit, f"{name}.units", 2 * rule.keys)
    queries, keys = graph.ops("Split", unit, outputs=2, name=f"{name}.query_key", axis=-1, num_outputs=2)
    return [queries, keys, values]


def _read(graph: Graph, name: str, index: int, rule: DeltaRule, inputs: list[ir.Value]) -> ir.Value:
    """Return the values that the queries read from the memory; the memory after the kept tokens becomes an output."""
    shape: GraphShape = ["batch", rule.value_heads, rule.key_dim, rule.value_dim]
    memory = graph.input(f"past.{index}.memory", FLOAT, shape)
    counts = _counts(graph, inputs[0])
    pieces = [
        graph.ops("Split", value, counts, outputs=2, name=f"{name}.pieces.{position}", axis=1)
        for position, value in enumerate(inputs)
    ]
    read = []
    for piece in range(2):
        query, key, value, decay, strength = (each[piece] for each in pieces)
        found, memory = graph.ops(
            "LinearAttention", query, key, value, memory, decay, strength,
            outputs=2, domain=MICROSOFT, name=f"{name}.read.{piece}", update_rule="gated_delta",
            q_num_heads=rule.key_heads, kv_num_heads=rule.value_heads, scale=rule.key_dim**-0.5,
        )  # fmt: skip
        if piece == 0:
            graph.output(memory, f"present.{index}.memory", FLOAT, shape)
        read.append(found)
    return graph.op("Concat", *read, name=f"{name}.read", axis=1)


def _counts(graph: Graph, x: ir.Value) -> ir.Value:
    """Return the numbers of kept and other tokens, computed once for all layers."""

    def write() -> ir.Value:
        kept = graph.input("kept", INT64, [1])
        rest = graph.op("Sub", graph.op("Shape", x, name="tokens", start=1, end=2), kept, name="not_kept")
        return graph.op("Concat", kept, rest, name="counts", axis=0)

    return graph.shared("counts", write)
