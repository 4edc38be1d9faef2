"""Reads the weights back from an artifact's GGUF file, with the reader of GGUF models, not the exporter's code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekit.contracts.neutral import on_disk
from edgekit.contracts.plan import Plan
from edgekit.model.gguf_source import open_gguf_tensors
from edgekit_llamacpp.layout import WEIGHTS


def weights(plan: Plan, files: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield every tensor of the model by its name, dequantised."""
    with open_gguf_tensors(files / WEIGHTS, with_second_table=True) as stored:
        for tensor in plan.model.tensors():
            name = on_disk(plan.model, tensor.name)
            yield tensor.name, stored.floats(name)
            stored.release(name)
