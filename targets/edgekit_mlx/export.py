"""Writes the files of an artifact: MLX-native safetensors, `config.json`, tokenizer and template. Needs no mlx.

Neutral weights are copied bit for bit: their bytes are MLX's words, and scales and biases are exact in 16 bits. MLX's
own formats are quantised from float weights. Tensors are streamed, so memory does not grow with the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgekit.common.files import write_file
from edgekit.common.parsing import read_json
from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights, is_module, on_disk
from edgekit.contracts.plan import Plan
from edgekit.errors import InvalidInput, Unsupported
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.source_files import copy_companions
from edgekit.model.tensors import Tensor
from edgekit_mlx.config import mlx_config
from edgekit_mlx.layout import (
    WEIGHTS,
    FloatType,
    MlxPacking,
    as_read,
    as_stored,
    file_tensors,
    float_type,
    module_on_disk,
    packings,
    stored_tensors,
)
from edgekit_mlx.native import quantise

_BLOCK_VALUES = 1 << 22
_LARGEST_FLOAT16 = 65504.0


def export(plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
    """Write the artifact's files into the empty directory `out`."""
    if plan.recipe.is_native() and not weights.recipe.is_exact():
        raise InvalidInput(
            f"mlx: {plan.recipe.name} is quantised from the float model, and these weights are {weights.recipe.name}"
        )
    recipe = plan.recipe if plan.recipe.is_native() else weights.recipe
    floats = float_type(plan)
    packed = packings(plan.model, recipe)
    tensors = file_tensors(plan.model)
    with TensorWriter(out / WEIGHTS, stored_tensors(plan.model, packed, floats)) as file:
        writing = _Writing(file, weights, floats)
        for done, (tensor, parts) in enumerate(tensors):
            progress(done, len(tensors), tensor.name)
            packing = packed.get(module_on_disk(plan.model, tensor)) if is_module(tensor) else None
            for index, part in enumerate(parts):
                place = Destination(on_disk(plan.model, tensor.name), index if part.is_of_expert else None)
                writing.write(place, part, packing)
            weights.release()
        file.seal()
    config = mlx_config(read_json(weights.folder / "config.json"), plan.model, packed, floats)
    write_file(out / "config.json", (json.dumps(config, indent=1) + "\n").encode())
    copy_companions(weights.folder, out)
    progress(len(tensors), len(tensors), "exported")


class Destination(NamedTuple):
    """A tensor of the file, or one expert of a stack."""

    name: str
    expert: int | None

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    def blocks(self, tensor: Tensor) -> Iterator[tuple[slice, int]]:
        """Cut a tensor's rows into blocks that are written at once; yield each with its first row in the file."""
        rows = tensor.shape[0]
        if self.expert is not None:  # a row of a stack is a whole expert
            yield slice(0, rows), self.expert
            return
        step = max(1, _BLOCK_VALUES // max(1, tensor.size // max(1, rows)))
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows)), start


class _Writing(NamedTuple):
    """An open file, and the weights that are written into it."""

    file: TensorWriter
    weights: NeutralWeights
    floats: FloatType

    def write(self, place: Destination, tensor: Tensor, packing: MlxPacking | None) -> None:
        if packing is None:
            for rows, first in place.blocks(tensor):
                self.file.write(place.name, as_stored(self.weights.floats(tensor.name, rows), self.floats), first)
        elif self.weights.format_of(tensor.module).is_float:
            self._quantise(place, tensor, packing)
        else:
            self._copy(place, tensor, packing)

    def _copy(self, place: Destination, tensor: Tensor, packing: MlxPacking) -> None:
        """Copy the neutral bytes; repeat a row's scale for each of its groups, and write the bias with it."""
        packed = self.weights.packed(tensor.module)
        for rows, first in place.blocks(tensor):
            self.file.write(place.name, packed[rows], first)
            scales = self.weights.scales(tensor.module, rows)
            repeats = tensor.shape[1] // packing.group // scales.shape[1]
            repeated = np.repeat(scales, repeats, axis=1) if repeats > 1 else scales
            stored, biases = as_stored(repeated, self.floats), repeated * -np.float32(2 ** (packing.bits - 1))
            minima = self.weights.minima(tensor.module, rows)
            if minima is not None:
                biases = np.repeat(minima, repeats, axis=1) if repeats > 1 else minima
            if self.floats == "F16" and abs(biases).max() > _LARGEST_FLOAT16:
                raise InvalidInput(
                    f"mlx: {tensor.module} has a scale of {abs(scales).max():g}, whose bias is beyond float16; "
                    "give a recipe whose float_format is bfloat16"
                )
            scales_kind = self.weights.format_of(tensor.module).scales
            kept = as_read(stored, self.floats), as_read(as_stored(biases, self.floats), self.floats)
            if scales_kind and not np.array_equal(kept, (repeated, biases)):
                raise Unsupported(
                    f"mlx: {tensor.module} has scales that {self.floats} does not hold; choose --recipe s8, which"
                    " rounds again"
                )
            self.file.write(f"{place.module}.scales", stored, first)
            self.file.write(f"{place.module}.biases", as_stored(biases, self.floats), first)

    def _quantise(self, place: Destination, tensor: Tensor, packing: MlxPacking) -> None:
        for rows, first in place.blocks(tensor):
            quantised = quantise(self.weights.floats(tensor.name, rows), packing)
            self.file.write(place.name, quantised.words, first)
            self.file.write(f"{place.module}.scales", quantised.scales, first)
