"""8-bit integers for servers that round the inputs of linears to 8 bits too, token by token.

Written in compressed-tensors' `int-quantized` layout: the integers and scales of neutral weights, whose inputs the
server rounds. vLLM has no other kernel for 8-bit integers on processors. Everything else stays as it is stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgekit import ModelSpec, NeutralWeights, Recipe, Tensor
from edgekit.common.files import sync_folder, write_file
from edgekit.common.parsing import read_json
from edgekit.contracts.neutral import StoredTensor, is_module, on_disk, stored_as
from edgekit.contracts.recipe import Format
from edgekit.formats.safetensors import TensorFolder
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.quant.hf_config import neutral_config
from edgekit.quant.shards import parts_of, shard_name, write_index
from edgekit.quant.source_files import copy_companions

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

LARGEST = 127
_SMALLEST_SCALE = 1e-12


def modules_with_int8_inputs(model: ModelSpec, recipe: Recipe) -> frozenset[str]:
    """Return the modules that can be multiplied with 8-bit inputs: s8 with one scale a row."""
    linears = (tensor for tensor in model.tensors() if is_module(tensor) and tensor.is_linear)
    return frozenset(tensor.module for tensor in linears if recipe.format_of(tensor).has_int8_inputs)


def round_inputs(inputs: torch.Tensor) -> None:
    """Round the input of a linear in place to signed 8-bit integers with one scale a token."""
    scales = (inputs.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=_SMALLEST_SCALE)
    inputs.div_(scales).round_().mul_(scales)


def write_int8(weights: NeutralWeights, folder: Path) -> None:
    """Write neutral weights to a new folder, with 8-bit integers in the `int-quantized` layout."""
    model, recipe = weights.model, weights.recipe
    folder.mkdir(parents=True)
    tensors = TensorFolder.open(weights.folder)
    parts = parts_of(model)
    shards = [shard_name(index, len(parts)) for index in range(len(parts))]
    for part, shard in zip(parts, shards, strict=True):
        stored = {each: list(_stored(each, recipe.format_of(each))) for each in part.tensors}
        names = {on_disk(model, name): (dtype, shape) for items in stored.values() for name, dtype, shape in items}
        with TensorWriter(folder / shard, names) as writer:
            for tensor, items in stored.items():
                for (name, _, _), array in zip(items, _arrays(weights, tensors, tensor), strict=True):
                    writer.write(on_disk(model, name), array)
            writer.seal()
    write_index(folder, shards)
    config = neutral_config(read_json(weights.folder / "config.json"), model, recipe, int8_inputs=True)
    write_file(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())
    copy_companions(weights.folder, folder)
    sync_folder(folder)


def _stored(tensor: Tensor, form: Format) -> Iterator[StoredTensor]:
    """Yield name, type and shape of each stored array of a tensor."""
    if tensor.is_linear and form.has_int8_inputs:
        yield StoredTensor(tensor.name, "I8", tensor.shape)
        yield StoredTensor(f"{tensor.module}.weight_scale", "F32", (tensor.shape[0], 1))
    else:
        yield from stored_as(tensor, form)


def _arrays(weights: NeutralWeights, tensors: TensorFolder, tensor: Tensor) -> Iterator[NDArray[np.generic]]:
    form = weights.recipe.format_of(tensor)
    if tensor.is_linear and form.has_int8_inputs:
        yield weights.integers(tensor.module)
        yield weights.scales(tensor.module).astype(np.float32)
    else:
        for item in stored_as(tensor, form):
            yield tensors.array(on_disk(weights.model, item.name))
