"""Embeddings of tokens on the host, for heads that read them: the look-up of the body's first graph, run alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgekit.contracts.plan import Plan
from edgekit.errors import DamagedArtifact, vendor_errors
from edgekit_onnx.audit import audit
from edgekit_onnx.layout import embedding_name, with_nodes
from edgekit_onnx.sessions import Provider, open_beside, options

if TYPE_CHECKING:
    from numpy.typing import NDArray


class EmbeddingRows:
    """Embeddings as the first layer reads them, from the weights in the file: none are copied."""

    def __init__(self, plan: Plan, files: Path, provider: Provider) -> None:
        data = with_embedding_alone(audit(plan, files)[0].data, embedding_name(plan.model))
        if data is None:
            raise DamagedArtifact(f"{files}: no graph looks embeddings up; export the artifact again")
        with vendor_errors("onnx"):
            self._session = open_beside(files, data, provider, options(1, packs=False))

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        with vendor_errors("onnx"):
            rows: NDArray[np.float32] = self._session.run(None, {"input_ids": np.array([tokens], np.int64)})[0][0]
        return rows


def with_embedding_alone(data: bytes, node_name: str) -> bytes | None:
    """Derive a graph that ends with the node `node_name`; None if there is none."""
    import onnx
    from onnx import TensorProto, helper

    model = onnx.ModelProto.FromString(data)
    graph, made = model.graph, {output: node for node in model.graph.node for output in node.output}
    last = next((node for node in graph.node if node.name == node_name), None)
    if last is None:
        return None
    needed, waiting = [], [last]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.append(node)
            waiting += [made[name] for name in node.input if name in made]
    read = {name for node in needed for name in node.input}
    for kept, all_of in (
        ([each for each in graph.initializer if each.name in read], graph.initializer),
        ([each for each in graph.input if each.name in read], graph.input),
        ([helper.make_tensor_value_info(last.output[0], TensorProto.FLOAT, None)], graph.output),
    ):
        copied = [type(each).FromString(each.SerializeToString()) for each in kept]
        del all_of[:]
        all_of.extend(copied)
    del graph.value_info[:]
    return with_nodes(model, reversed(needed))
