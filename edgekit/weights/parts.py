"""The parts of a model that are quantised and stored together: the embedding, each layer, and what follows the last.

Every part is one shard, whole or absent. Weights pass in blocks of rows. Knows nothing of calibration or of the store.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from edgekit.errors import InvalidInput, clip
from edgekit.files import write_file
from edgekit.model import ModelSpec, Tensor
from edgekit.recipe import Format, Recipe
from edgekit.weights.neutral import FLOAT_DTYPES, Statistics, bits_of, on_disk, stored_as
from edgekit.weights.packing import float32_to_bf16, pack
from edgekit.weights.rtn import Rounded, blocks, dequantise, in_parallel, refuse_unstorable, round_to_nearest
from edgekit.weights.safetensors import INDEX, TensorFolder, read_header
from edgekit.weights.writing import TensorWriter

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


class Read(Protocol):
    """A float tensor, or some of its rows, as float32."""

    def __call__(self, name: str, rows: slice | None = None) -> torch.Tensor: ...


class Part(NamedTuple):
    """Tensors that are quantised together and stored in one shard. `layer` is None before and after the layers."""

    number: int
    layer: int | None
    tensors: tuple[Tensor, ...]
    prefix: str  # what the names of its tensors begin with

    @property
    def title(self) -> str:
        if self.layer is not None:
            return f"layer {self.layer}"
        return "embedding" if self.number == 0 else "head"


class Choice(NamedTuple):
    """What a method made of a part: the floats to store, and the matrices whose integers it chose itself."""

    read: Read
    rounded: Mapping[str, Rounded]
    output_errors: Mapping[str, float]


def parts_of(model: ModelSpec) -> list[Part]:
    """The embedding, the layers in order, the rest."""
    found: dict[int, list[Tensor]] = {index: [] for index in range(-1, len(model.layers) + 1)}
    prefix = f"{model.prefix}layers."
    for tensor in model.tensors():
        if tensor.name.startswith(prefix):
            found[int(tensor.name.removeprefix(prefix).partition(".")[0])].append(tensor)
        else:
            found[-1 if tensor.role == "embedding" else len(model.layers)].append(tensor)
    last = len(model.layers)
    return [
        Part(index, key, tuple(tensors), f"{prefix}{key}.")
        if 0 <= key < last
        else Part(index, None, tuple(tensors), "")
        for index, (key, tensors) in enumerate(sorted(found.items()))
    ]


def shard_name(index: int, count: int) -> str:
    """The file that holds a part."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def reader(source: TensorFolder, model: ModelSpec) -> Read:
    """Rows of the source's tensors as float32, whose pages are given back once they were copied."""
    import torch

    shapes = {tensor.name: tensor.shape for tensor in model.tensors()}

    def read(name: str, rows: slice | None = None) -> torch.Tensor:
        shape = source.entry(name).shape
        if shape != shapes[name]:
            raise InvalidInput(f"tensor {clip(name)} has shape {shape}, the config asks for {shapes[name]}")
        return torch.from_numpy(source.floats(name, rows))

    return read


def write_part(
    path: Path,
    part: Part,
    model: ModelSpec,
    recipe: Recipe,
    choice: Choice,
    release: Callable[[str], None] = lambda name: None,
) -> dict[str, Statistics]:
    """Store a part: the matrices that were chosen as they are, others rounded to nearest, the rest as floats."""
    formats = {tensor.name: recipe.format_of(tensor) for tensor in part.tensors}
    stored = [item for tensor in part.tensors for item in stored_as(tensor, formats[tensor.name])]
    statistics: dict[str, Statistics] = {}
    names = {item.name: on_disk(model, item.name) for item in stored}
    with TensorWriter(path, {names[item.name]: (item.dtype, item.shape) for item in stored}) as writer:
        for tensor in part.tensors:
            target = formats[tensor.name]
            if target.is_float:
                _write_floats(writer, names, tensor, target, choice.read)
            else:
                error = _write_matrix(writer, names, tensor, target, choice.read, choice.rounded.get(tensor.module))
                statistics[tensor.module] = Statistics(
                    weight_error=error, output_error=choice.output_errors.get(tensor.module)
                )
            release(tensor.name)
        write_file(_statistics_path(path), _as_json(statistics))
        writer.seal()
    return statistics


def _write_floats(writer: TensorWriter, names: Mapping[str, str], tensor: Tensor, stored: Format, read: Read) -> None:
    rows = tensor.shape[0]
    width = int(np.prod(tensor.shape[1:], dtype=np.int64))
    for block in blocks(rows, width):
        values = read(tensor.name, block).numpy()
        if not np.isfinite(values).all():
            raise InvalidInput(f"tensor {clip(tensor.name)}: holds values that are not finite, near row {block.start}")
        writer.write(names[tensor.name], as_stored(values, stored, tensor.name), block.start)


def as_stored(values: NDArray[np.float32], stored: Format, name: str) -> NDArray[Any]:
    """Floats in the type they are stored in; refused where the type cannot hold them."""
    if stored.kind == "float32":
        return values
    if stored.kind == "bfloat16":
        return float32_to_bf16(values)
    if values.size and np.abs(values).max() > np.finfo(np.float16).max:
        raise InvalidInput(
            f"tensor {clip(name)}: {np.abs(values).max():g} does not fit {FLOAT_DTYPES[stored.kind]}; "
            "give the recipe `float_format: {kind: bfloat16}`"
        )
    return values.astype(np.float16)


def _write_matrix(
    writer: TensorWriter,
    names: Mapping[str, str],
    tensor: Tensor,
    stored: Format,
    read: Read,
    rounded: Rounded | None,
) -> float:
    outputs, inputs = tensor.shape

    def write(block: slice) -> tuple[float, float]:
        weights = read(tensor.name, block)
        refuse_unstorable(weights, stored, tensor.name, block.start)
        if rounded is None:
            integers, scales = round_to_nearest(weights, stored)
        else:
            integers, scales = rounded.integers[block], rounded.scales[block]
        writer.write(names[f"{tensor.module}.weight_packed"], pack(integers.numpy(), bits_of(stored)), block.start)
        writer.write(names[f"{tensor.module}.weight_scale"], float32_to_bf16(scales.numpy()), block.start)
        lost = dequantise(integers, scales).sub_(weights).square_().sum()
        return float(lost), float(weights.square_().sum())

    lost, whole = zip(*in_parallel(write, blocks(outputs, inputs)), strict=True)
    writer.write(names[f"{tensor.module}.weight_shape"], np.array([outputs, inputs], np.int64))
    return math.fsum(lost) / (math.fsum(whole) or 1.0)


def _statistics_path(shard: Path) -> Path:
    return shard.with_name(f".{shard.name}.statistics")


def _as_json(statistics: Mapping[str, Statistics]) -> bytes:
    return json.dumps({name: item.model_dump() for name, item in statistics.items()}).encode()


def read_statistics(shard: Path) -> dict[str, Statistics]:
    """What was noted when a shard was written; it is there whenever the shard is."""
    found = json.loads(_statistics_path(shard).read_bytes())
    return {name: Statistics(**item) for name, item in found.items()}


def forget_statistics(shard: Path) -> None:
    """Remove the note once the manifest holds it."""
    _statistics_path(shard).unlink(missing_ok=True)


def write_index(folder: Path, shards: Sequence[str]) -> None:
    """The index that says which shard holds which tensor."""
    weight_map: dict[str, str] = {}
    total = 0
    for shard in shards:
        for name, entry in read_header(folder / shard).items():
            weight_map[name] = shard
            total += entry.bytes
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    write_file(folder / INDEX, text.encode())


def tools() -> dict[str, str]:
    """What the integers depend on."""
    from importlib.metadata import version

    import torch

    return {"edgekit": version("edgekit"), "torch": torch.__version__, "python": platform.python_version()}
