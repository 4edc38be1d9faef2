"""Writes the files of an artifact: MLX-native safetensors, `config.json`, tokenizer and template. No mlx is needed.

Common weights go over bit for bit: their bytes are MLX's words already, scales are exact in 16 bits, and so are biases.
Vendor formats are quantised here from float weights. Tensors are streamed, so memory does not grow with the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edgekit.errors import InvalidInput, Unsupported
from edgekit.files import write_file
from edgekit.interfaces import Progress
from edgekit.model import ModelSpec, Tensor
from edgekit.plan import Plan
from edgekit.reading import read_json
from edgekit.weights.neutral import NeutralWeights, is_module, on_disk
from edgekit.weights.sources import copy_companions
from edgekit.weights.writing import TensorWriter
from edgekit_mlx.config import mlx_config
from edgekit_mlx.layout import WEIGHTS, FloatType, Packing, float_type, module_on_disk, packings, stored_tensors
from edgekit_mlx.native import quantise
from edgekit_mlx.numbers import as_stored

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma2", "gemma3_text")
_BLOCK_VALUES = 1 << 22
_LARGEST_FLOAT16 = 65504.0


def export(plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
    """Write the artifact's files into the empty directory `out`."""
    recipe = plan.recipe if plan.recipe.is_native() else weights.recipe
    if plan.model.family not in FAMILIES:
        raise Unsupported(f"mlx: no family {plan.model.family}; there are {', '.join(FAMILIES)}")
    if plan.recipe.is_native() and not weights.recipe.is_exact():
        raise InvalidInput(
            f"mlx: {plan.recipe.name} is quantised from the float model, and these weights are {weights.recipe.name}"
        )
    floats = float_type(plan)
    packed = packings(plan.model, recipe)
    expected = {stored.name: (stored.dtype, stored.shape) for stored in stored_tensors(plan.model, packed, floats)}
    tensors = list(plan.model.tensors())
    with TensorWriter(out / WEIGHTS, expected) as file:
        for done, tensor in enumerate(tensors):
            progress(done, len(tensors), tensor.name)
            packing = packed.get(module_on_disk(plan.model, tensor)) if is_module(tensor) else None
            _write(file, plan.model, weights, tensor, packing, floats)
            weights.release()
        file.seal()
    config = mlx_config(read_json(weights.folder / "config.json"), plan.model, packed, floats)
    write_file(out / "config.json", (json.dumps(config, indent=1) + "\n").encode())
    copy_companions(weights.folder, out)
    progress(len(tensors), len(tensors), "exported")


def _write(
    file: TensorWriter,
    model: ModelSpec,
    weights: NeutralWeights,
    tensor: Tensor,
    packing: Packing | None,
    floats: FloatType,
) -> None:
    name = on_disk(model, tensor.name)
    if packing is None:
        for rows in _blocks(tensor):
            file.write(name, as_stored(weights.floats(tensor.name, rows), floats), rows.start)
    elif weights.format_of(tensor.module).is_float:
        _quantise(file, weights, tensor, packing, name, floats)
    else:
        _copy(file, weights, tensor, packing, name, floats)


def _copy(
    file: TensorWriter, weights: NeutralWeights, tensor: Tensor, packing: Packing, name: str, floats: FloatType
) -> None:
    """The neutral bytes are the words; a scale goes to each group of its row, and its bias beside it."""
    module = name.removesuffix(".weight")
    packed = weights.packed(tensor.module)
    for rows in _blocks(tensor):
        file.write(name, packed[rows], rows.start)
        scales = weights.scales(tensor.module, rows)
        repeats = tensor.shape[1] // packing.group // scales.shape[1]
        wide = np.repeat(scales, repeats, axis=1) if repeats > 1 else scales
        stored, biases = as_stored(wide, floats), wide * -np.float32(2 ** (packing.bits - 1))
        if floats == "F16" and biases.min() < -_LARGEST_FLOAT16:
            raise InvalidInput(
                f"mlx: {tensor.module} has a scale of {scales.max():g}, whose bias is beyond float16; "
                "give a recipe whose float_format is bfloat16"
            )
        file.write(f"{module}.scales", stored, rows.start)
        file.write(f"{module}.biases", as_stored(biases, floats), rows.start)


def _quantise(
    file: TensorWriter, weights: NeutralWeights, tensor: Tensor, packing: Packing, name: str, floats: FloatType
) -> None:
    module = name.removesuffix(".weight")
    for rows in _blocks(tensor):
        found = quantise(weights.floats(tensor.name, rows), packing, floats)
        file.write(name, found.words, rows.start)
        file.write(f"{module}.scales", found.scales, rows.start)
        if found.biases is not None:
            file.write(f"{module}.biases", found.biases, rows.start)


def _blocks(tensor: Tensor) -> Iterator[slice]:
    """Rows that are written at once."""
    rows = tensor.shape[0]
    step = max(1, _BLOCK_VALUES // max(1, tensor.size // max(1, rows)))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
