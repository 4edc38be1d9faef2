"""The importance of each input of a model's matrices: its mean square on calibration text, a weight for errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from edgekit.common.progress import Progress
from edgekit.model.spec import ModelSpec
from edgekit.quant import reference_decoder as decoder
from edgekit.quant.calibration import Calibration

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_SEQUENCES_AT_ONCE = 4
_LEAST = 1e-6  # share of the mean that unused inputs get


def mean_squares(
    model: ModelSpec, calibration: Calibration, read: Callable[[str], NDArray[np.float32]], progress: Progress
) -> dict[str, NDArray[np.float32]]:
    """Return the mean squares by module; a tied head is the embedding's module. Holds one layer at a time."""
    import torch

    ids, sums = torch.tensor(calibration.sequences), dict[str, "torch.Tensor"]()

    def add(module: str, inputs: torch.Tensor) -> None:
        squares = inputs.flatten(0, -2).square().mean(0)
        sums[module] = sums[module] + squares if module in sums else squares

    with torch.inference_mode():
        table = f"{model.prefix}embed_tokens"
        rows = torch.from_numpy(read(f"{table}.weight"))
        batches = [decoder.embed(model, rows[batch]) for batch in torch.split(ids, _SEQUENCES_AT_ONCE)]
        del rows
        for index in range(len(model.layers)):
            progress(index, len(model.layers), f"importance: layer {index}")
            hooks = decoder.Hooks(decoder.of_layer(model, index, add))
            tensors = decoder.layer_tensors(model, index, lambda name: torch.from_numpy(read(name)))
            for position, hidden in enumerate(batches):
                batches[position] = decoder.layer_forward(model, index, tensors, hidden, hooks)
        norm = torch.from_numpy(read(decoder.last_norm(model)))
        for hidden in batches:
            add(table if model.tied else model.head, decoder.final_norm(model, norm, hidden))
    return {module: _raised(each.numpy()) for module, each in sums.items()}


def _raised(squares: NDArray[np.float32]) -> NDArray[np.float32]:
    least = np.float32(max(float(squares.mean()) * _LEAST, 1e-30))
    return np.maximum(squares, least).astype(np.float32)
