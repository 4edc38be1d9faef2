"""Graphs that also give attention's weights, derived from those that run a state, for windows that keep by attention.

Weights are summed over the queries of a call in the graph: only [head, token] leaves it.
"""

from __future__ import annotations

from edgekit_onnx.layout import attention_name, with_nodes

_KIND, _AFTER_SOFTMAX = "qk_output", 2  # the attribute that asks for weights
_OUTPUTS = 4  # of attention: output, keys, values, weights
_QUERIES = "attention.queries"


def with_attention(data: bytes) -> bytes:
    """Derive a graph with an output `attention.<layer>` [sequence, head, token] for every layer with its own cache.

    The derived graph has a float32 cache; `with_halves` may follow.
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
