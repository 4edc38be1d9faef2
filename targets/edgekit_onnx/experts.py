"""A mixture of experts as one operator, which reads the weights of the experts that tokens choose: QMoE, or MoE.

The operator holds an expert's gate and up projection as one matrix whose rows alternate.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from edgekit.model.parts import Experts
from edgekit_onnx.graph import MICROSOFT, Graph
from edgekit_onnx.packing import OnnxPacking

UINT8, INT64 = ir.DataType.UINT8, ir.DataType.INT64


def write_experts(graph: Graph, packing: OnnxPacking, experts: Experts, layer: str, x: ir.Value) -> ir.Value:
    """Write the mixture of the layer `layer` for `x` [batch, tokens, hidden]."""
    name = f"{layer}.{experts.block}.experts"
    router = f"{layer}.{experts.router}"
    bias = packing.vector(f"{router}.bias") if experts.linear_bias else None
    routed = graph.linear(x, packing.float_table(router), router, bias)
    by_token = graph.constant(f"by_token.{experts.count}", [-1, experts.count], INT64)
    scores = graph.op("Reshape", routed, by_token, name=f"{router}.by_token")
    modules: list[list[str]] = [
        [f"{layer}.{module}" for module in experts.modules(expert)] for expert in range(experts.count)
    ]
    feeding, leaving = packing.experts([each[:2] for each in modules], [each[2:] for each in modules])
    attributes: dict[str, Any] = {
        "k": experts.active,
        "normalize_routing_weights": int(experts.normalise),
        "activation_type": "swiglu",
        "activation_alpha": experts.swiglu.alpha if experts.swiglu else 1.0,
        "activation_beta": 1.0 if experts.swiglu else 0.0,
        "swiglu_fusion": 1,
    }
    if experts.swiglu:
        attributes["swiglu_limit"] = experts.swiglu.limit
    inputs: list[ir.Value | None] = [x, scores]
    for part, matrix, places in (("gate_up", feeding, slice(0, 2)), ("down", leaving, slice(2, 3))):
        shape = [experts.count, matrix.outputs // experts.count]
        number, width = (UINT8, matrix.inputs * matrix.bits // 8) if matrix.bits else (graph.numbers, matrix.inputs)
        inputs.append(graph.stored(f"{name}.{part}.weight", number, [*shape, width], matrix.values))
        if matrix.scales is not None:
            inputs.append(graph.scales(f"{name}.{part}.scales", matrix.scales, [*shape, matrix.blocks]))
        if not experts.linear_bias:
            inputs.append(None)
            continue
        biases = packing.biases([each[places] for each in modules])
        inputs.append(graph.stored(f"{name}.{part}.bias", graph.numbers, shape, biases))
    if not feeding.bits:
        attributes["normalize_routing_weights"] = 1
        mixed = graph.op("MoE", *inputs, domain=MICROSOFT, name=name, **attributes)
        return mixed if experts.normalise else _shared(graph, experts, routed, mixed, name)
    sigmoid = experts.scoring == "sigmoid"
    if sigmoid or not experts.normalise:  # shares of their own for the experts that the scores choose
        kind = "Sigmoid" if sigmoid else "Softmax"  # of the last axis by default
        shares = graph.op(kind, scores, name=f"{router}.shares")
        inputs += [*[None] * (_ROUTER_WEIGHTS - len(inputs)), shares]
        if experts.biased:
            place = packing.vector(f"{layer}.{experts.block}.expert_bias")
            bias = graph.stored(f"{layer}.{experts.block}.expert_bias", graph.numbers, [experts.count], place)
            inputs[1] = graph.op("Add", shares, bias, name=f"{router}.biased")
    return graph.op(
        "QMoE", *inputs, domain=MICROSOFT, name=name, expert_weight_bits=feeding.bits, block_size=feeding.block,
        accuracy_level=graph.accuracy_level, **attributes,
    )  # fmt: skip


def _shared(graph: Graph, experts: Experts, routed: ir.Value, mixed: ir.Value, name: str) -> ir.Value:
    """Scale a normalised mixture by the share of its experts among all.

    Where `MoE` does not normalise, onnxruntime 1.31.1 may reuse its input for the output, and gives zeros.
    """
    shares = graph.op("Softmax", routed, name=f"{name}.shares", axis=-1)
    active = graph.constant(f"active.{experts.active}", [experts.active], INT64)
    largest, _ = graph.ops("TopK", shares, active, outputs=2, name=f"{name}.largest", axis=-1)
    axis = graph.constant("axis.last", [-1], INT64)
    share = graph.op("ReduceSum", largest, axis, name=f"{name}.share", keepdims=1)
    return graph.op("Mul", mixed, share, name=f"{name}.scaled")


_ROUTER_WEIGHTS = 14  # index of this input of QMoE
