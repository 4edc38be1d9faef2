"""The file of a numpy artifact: one safetensors file with every tensor by its name in the model.

A quantised matrix is two tensors, `<module>.weight` (int8) and `<module>.scale` (one float32 for each row); all others
are float32. The integers and scales come from the neutral weights unchanged: nothing is rounded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights, is_module
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import Recipe
from edgekit.errors import DamagedArtifact
from edgekit.formats.safetensors import TensorFolder
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

WEIGHTS = "model.safetensors"


def write_weights(model: ModelSpec, weights: NeutralWeights, out: Path, progress: Progress) -> None:
    """Write the artifact's file into the empty directory `out`."""
    tensors = list(model.tensors())
    with TensorWriter(out / WEIGHTS, _stored_tensors(model, weights.recipe)) as file:
        for done, tensor in enumerate(tensors):
            progress(done, len(tensors), tensor.name)
            if _is_quantised(tensor, weights.recipe):
                file.write(tensor.name, weights.integers(tensor.module))
                file.write(f"{tensor.module}.scale", weights.scales(tensor.module))
            else:
                file.write(tensor.name, weights.tensor(tensor.name))
            weights.release()  # give the pages back: memory does not grow with the model
        file.seal()
    progress(len(tensors), len(tensors), "exported")


def read_weights(plan: Plan, files: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield every tensor of the model in float32, by its name. Raises DamagedArtifact where the file differs."""
    with TensorFolder.open(files / WEIGHTS) as stored:
        for name, (dtype, shape) in _stored_tensors(plan.model, plan.recipe).items():
            entry = stored.entry(name)
            if (entry.dtype, entry.shape) != (dtype, shape):
                raise DamagedArtifact(
                    f"{files / WEIGHTS}: {name} is {entry.dtype} {entry.shape}, expected {dtype} {shape}; export again"
                )
        for tensor in plan.model.tensors():
            if _is_quantised(tensor, plan.recipe):
                yield tensor.name, stored.array(tensor.name) * stored.floats(f"{tensor.module}.scale")
            else:
                yield tensor.name, stored.floats(tensor.name)


def _stored_tensors(model: ModelSpec, recipe: Recipe) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of everything in the file."""
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor in model.tensors():
        if _is_quantised(tensor, recipe):
            stored[tensor.name] = ("I8", tensor.shape)
            stored[f"{tensor.module}.scale"] = ("F32", (tensor.shape[0], 1))
        else:
            stored[tensor.name] = ("F32", tensor.shape)
    return stored


def _is_quantised(tensor: Tensor, recipe: Recipe) -> bool:
    return is_module(tensor) and not recipe.format_of(tensor).is_float
