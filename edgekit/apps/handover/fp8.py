"""FP8 weights for servers: E4M3 with one scale a row, and activations that the server rounds token by token.

Written in compressed-tensors' `float-quantized` layout. No target here runs them; `Fp8Weights` emulates a server's
arithmetic in float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgekit import ModelSource, ModelSpec, Recipe, Tensor, open_tensors
from edgekit.common.files import sync_folder, write_file
from edgekit.common.parsing import read_json
from edgekit.common.progress import Progress
from edgekit.contracts.neutral import FLOAT_DTYPES, on_disk
from edgekit.errors import InvalidInput, quote_short
from edgekit.formats.safetensors import TensorFolder
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.quant.hf_config import neutral_config
from edgekit.quant.shards import as_stored, parts_of, reader, shard_name, write_index
from edgekit.quant.source_files import copy_companions

if TYPE_CHECKING:
    import torch

LARGEST = 448.0  # of E4M3
_SMALLEST_SCALE = 2.0**-30


class Fp8Rows(NamedTuple):
    """Rows in FP8, with a scale for each row."""

    codes: torch.Tensor  # uint8
    scales: torch.Tensor  # float32, [rows, 1]

    def dequantised(self) -> torch.Tensor:
        import torch

        return self.codes.view(torch.float8_e4m3fn).float() * self.scales


def to_fp8(rows: torch.Tensor) -> Fp8Rows:
    """Round rows to E4M3, each scaled so that its largest value becomes the format's largest."""
    import torch

    scales = (rows.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=_SMALLEST_SCALE)
    codes = (rows / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Fp8Rows(codes.view(torch.uint8), scales)


def round_activations(name: str, inputs: torch.Tensor) -> None:
    """Round the input of a linear in place, token by token, as a server does before an FP8 product."""
    inputs.copy_(to_fp8(inputs).dequantised())


def round_cache(name: str, values: torch.Tensor) -> None:
    """Round keys or values in place, as a server stores them in an FP8 cache without scales."""
    import torch

    values.copy_(values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float())


class Fp8Weights:
    """A model's weights in FP8, as `write_fp8` wrote them to a folder; read as float32."""

    def __init__(self, folder: Path, model: ModelSpec, recipe: Recipe) -> None:
        self.folder, self.model, self.recipe = folder, model, recipe
        self._tensors = TensorFolder.open(folder)
        self._modules = {tensor.name: tensor for tensor in model.tensors()}

    def tensor(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Return a tensor of the model, or some rows of it, dequantised."""
        import torch

        stored = on_disk(self.model, name)
        if self.recipe.format_of(self._modules[name]).is_float:
            return torch.from_numpy(np.array(self._tensors.floats(stored, rows)))
        codes = torch.from_numpy(np.array(self._tensors.array(stored, rows)).view(np.uint8))
        scales = self._tensors.floats(f"{stored.removesuffix('.weight')}.weight_scale", rows)
        return Fp8Rows(codes, torch.from_numpy(np.array(scales))).dequantised()


def write_fp8(source: ModelSource, recipe: Recipe, folder: Path, progress: Progress) -> Fp8Weights:
    """Round a float model to FP8 into a new folder, part by part; nothing is calibrated."""
    model = source.spec
    folder.mkdir(parents=True)
    tensors = open_tensors(source.weights)
    with ExitStack() as stack:
        stack.callback(tensors.close)
        read = reader(tensors, model)
        parts = parts_of(model)
        shards = [shard_name(index, len(parts)) for index in range(len(parts))]
        for done, (part, shard) in enumerate(zip(parts, shards, strict=True)):
            progress(done, len(parts), f"FP8: {part.title}")
            stored = {each: list(_stored(each, recipe)) for each in part.tensors}
            names = {on_disk(model, name): (dtype, shape) for items in stored.values() for name, dtype, shape in items}
            with TensorWriter(folder / shard, names) as writer:
                for tensor, items in stored.items():
                    values = read(tensor.name)
                    if not bool(values.isfinite().all()):
                        raise InvalidInput(f"tensor {quote_short(tensor.name)}: holds values that are not finite")
                    arrays = _arrays(tensor, recipe, values)
                    for (name, _, _), array in zip(items, arrays, strict=True):
                        writer.write(on_disk(model, name), array)
                writer.seal()
        progress(len(parts), len(parts), "FP8")
    write_index(folder, shards)
    config = neutral_config(read_json(source.folder / "config.json"), model, recipe)
    write_file(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())
    copy_companions(source.folder, folder)
    sync_folder(folder)
    return Fp8Weights(folder, model, recipe)


def _stored(tensor: Tensor, recipe: Recipe) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, type and shape of each stored array of a tensor."""
    form = recipe.format_of(tensor)
    if form.is_float:
        yield tensor.name, FLOAT_DTYPES[form.kind], tensor.shape
    else:
        yield tensor.name, "F8_E4M3", tensor.shape
        yield f"{tensor.module}.weight_scale", "F32", (tensor.shape[0], 1)


def _arrays(tensor: Tensor, recipe: Recipe, values: torch.Tensor) -> list[np.ndarray]:
    form = recipe.format_of(tensor)
    if form.is_float:
        return [as_stored(values.numpy(), form, tensor.name)]
    rounded = to_fp8(values)
    return [rounded.codes.numpy(), rounded.scales.numpy()]
