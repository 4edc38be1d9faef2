"""What heads read on the host: embeddings, by the look-up of the body's first graph run alone, and the last norm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgekit.contracts.plan import Plan
from edgekit.errors import DamagedArtifact, vendor_errors
from edgekit_onnx.audit import audit
from edgekit_onnx.data_file import DATA_FILE
from edgekit_onnx.layout import embedding_name, read_nodes, with_nodes
from edgekit_onnx.sessions import Provider, open_graph, options

if TYPE_CHECKING:
    from numpy.typing import NDArray


class EmbeddingRows:
    """Embeddings as the first layer reads them, from the weights in the file: none are copied."""

    def __init__(self, plan: Plan, files: Path, provider: Provider) -> None:
        data = with_embedding_alone(audit(plan, files)[0].data, embedding_name(plan.model))
        if data is None:
            raise DamagedArtifact(f"{files}: no graph looks embeddings up; export the artifact again")
        with vendor_errors("onnx"):
            self._session = open_graph(files, data, provider, options(1, packs=False))

    def __call__(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        with vendor_errors("onnx"):
            rows: NDArray[np.float32] = self._session.run(None, {"input_ids": np.array([tokens], np.int64)})[0][0]
        return rows


def with_embedding_alone(data: bytes, node_name: str) -> bytes | None:
    """Derive a graph that ends with the node `node_name`; None if there is none."""
    import onnx
    from onnx import TensorProto, helper

    model = onnx.ModelProto.FromString(data)
    graph = model.graph
    last = next((node for node in graph.node if node.name == node_name), None)
    if last is None:
        return None
    needed = read_nodes(graph.node, last.output)
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
    return with_nodes(model, needed)


class FinalNorm:
    """The last norm, for callers that need hidden states: the head's graph only has logits."""

    def __init__(self, plan: Plan, files: Path) -> None:
        import onnx

        name = f"{plan.model.prefix}{plan.model.names.last_norm}.weight"
        graph = onnx.ModelProto.FromString(audit(plan, files)[-1].data).graph
        stored = next((tensor for tensor in graph.initializer if tensor.name == name), None)
        if stored is None or list(stored.dims) != [plan.model.hidden_size] or not stored.external_data:
            raise DamagedArtifact(f"{files}: no graph holds {name}; export the artifact again")
        place = {entry.key: int(entry.value) for entry in stored.external_data if entry.key != "location"}
        # The audit has checked that these bytes exist.
        self._weight = np.fromfile(files / DATA_FILE, np.float32, plan.model.hidden_size, offset=place["offset"])
        self._epsilon = np.float32(plan.model.norm_epsilon)

    def __call__(self, hidden: NDArray[Any]) -> NDArray[np.float32]:
        """Return a normalised copy of [tokens, width]."""
        squares = np.einsum("ij,ij->i", hidden, hidden, dtype=np.float32) / np.float32(hidden.shape[-1])
        normed: NDArray[np.float32] = hidden * (1 / np.sqrt(squares + self._epsilon))[:, None]
        normed *= self._weight
        return normed
