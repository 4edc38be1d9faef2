"""Inputs of layers as ONNX operators: rows of a second embedding, mixed with a projection of the first (Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from edgekit.model.spec import ModelSpec
from edgekit_onnx.graph import Graph
from edgekit_onnx.layout import LAYER_INPUTS
from edgekit_onnx.packing import OnnxPacking

INT64 = ir.DataType.INT64


def write_layer_inputs(
    graph: Graph, packing: OnnxPacking, model: ModelSpec, ids: ir.Value, embedded: ir.Value
) -> Sequence[ir.Value]:
    """Write the input [batch, tokens, size] of each layer. `embedded` are the tokens' scaled embeddings."""
    assert model.per_layer_input is not None
    layers, size, name = len(model.layers), model.per_layer_input.size, f"{model.prefix}per_layer_projection_norm"
    shape = graph.constant("layer_inputs.shape", [0, 0, layers, size], INT64)

    def scaled(x: ir.Value, factor: float, part: str) -> ir.Value:
        return graph.op("Mul", x, graph.constant(f"{part}.factor", factor), name=part)

    rows = graph.lookup(packing.table(f"{model.prefix}embed_tokens_per_layer"), ids, LAYER_INPUTS)
    rows = graph.op("Reshape", rows, shape, name="layer_inputs.rows")
    module = f"{model.prefix}per_layer_model_projection"
    projected = graph.linear(embedded, packing.matrix(module), module)
    projected = scaled(projected, model.hidden_size**-0.5, "layer_inputs.projected")
    projected = graph.op("Reshape", projected, shape, name="layer_inputs.by_layer")
    weight = graph.stored(f"{name}.weight", graph.numbers, [size], packing.vector(f"{name}.weight"))
    normed = graph.norm(projected, weight, model.norm_epsilon, name)
    both = graph.op("Add", normed, scaled(rows, size**0.5, "layer_inputs.scaled"), name="layer_inputs.sum")
    joined = graph.constant("layer_inputs.joined", [0, 0, layers * size], INT64)
    mixed = graph.op("Reshape", scaled(both, 2**-0.5, "layer_inputs.mixed"), joined, name="layer_inputs.by_token")
    # One Split, because onnxruntime would join a Gather for each layer into a Split that it cannot save.
    return graph.ops("Split", mixed, outputs=layers, name="layer_inputs.of", axis=-1, num_outputs=layers)


def add_own_input(
    graph: Graph, packing: OnnxPacking, model: ModelSpec, index: int, hidden: ir.Value, own: ir.Value
) -> ir.Value:
    """Write the part of layer `index` that adds its own input, gated by the hidden states, to them."""
    name = f"{model.prefix}layers.{index}"
    gate, projection, norm = (
        f"{name}.{part}" for part in ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
    )
    gated = graph.activation(graph.linear(hidden, packing.matrix(gate), gate), model.activation, f"{gate}.activation")
    mixed = graph.op("Mul", gated, own, name=f"{gate}.gated")
    mixed = graph.linear(mixed, packing.matrix(projection), projection)
    weight = graph.stored(f"{norm}.weight", graph.numbers, [model.hidden_size], packing.vector(f"{norm}.weight"))
    return graph.op("Add", hidden, graph.norm(mixed, weight, model.norm_epsilon, norm), name=f"{norm}.added")
