"""The last norm of a decoder on the host, for callers that need hidden states: the head's graph only has logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.plan import Plan
from edgekit.errors import DamagedArtifact
from edgekit_onnx.audit import audit
from edgekit_onnx.data_file import DATA_FILE


class FinalNorm:
    """The RMS norm of the head's graph."""

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
