"""Opens the files of an artifact: checked, then each graph as a session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgekit.plan import Plan
from edgekit_onnx.parts import HEAD, Part, parts_of
from edgekit_onnx.sessions import open_session, options
from edgekit_onnx.slab import LayerShape, MappedSlab, Slab


class Loaded(NamedTuple):
    """The sessions of an artifact, and what the engine needs to know of them."""

    bodies: tuple[tuple[Part, Any], ...]
    head: Any
    numbers: np.dtype[Any]
    pairs: bool  # see exactness
    key: str  # the same for the same bytes
    notes: tuple[str, ...]
    backend: str

    def slab(self, layers: Sequence[LayerShape], rows: int, capacity: int, dtype: np.dtype[Any]) -> Slab:
        """Memory for keys and values, where the provider computes."""
        return MappedSlab(layers, rows, capacity, dtype)

    def close(self) -> None:
        """Sessions go when nobody holds them."""


def load(plan: Plan, files: Path) -> Loaded:
    chosen = options(plan.threads)
    bodies = tuple((part, open_session(files / f"{part.name}.onnx", plan.backend, chosen)) for part in parts_of(plan))
    head = open_session(files / f"{HEAD}.onnx", plan.backend, chosen)
    numbers = np.dtype(np.float16 if plan.backend == "cuda" else np.float32)
    return Loaded(bodies, head, numbers, True, "", (), plan.backend)
