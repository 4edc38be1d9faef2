"""The parts of a model that are quantised and stored together: the embedding, each layer, and the tensors after them.

Every part is one shard, whole or absent. Weights are read and written in blocks of rows.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from edgekit.common.files import write_file
from edgekit.common.packages import versions_of
from edgekit.contracts.neutral import FLOAT_DTYPES, Statistics, bits_of, on_disk, stored_as
from edgekit.contracts.recipe import Format, Recipe
from edgekit.errors import InvalidInput, quote_short
from edgekit.formats.int_packing import IntegerRows, float32_to_bf16, pack
from edgekit.formats.safetensors import INDEX, read_header
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor
from edgekit.quant.rtn import IntMatrix, blocks, in_parallel, refuse_unstorable, round_rows

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from edgekit.model.source import SourceTensors


class ReadRows(Protocol):
    """Reads a tensor, or some of its rows, as float32: a tensor on a device, or an array where nothing is computed."""

    def __call__(self, name: str, rows: slice | None = None) -> torch.Tensor: ...


class WeightPart(NamedTuple):
    """Tensors that are quantised together and stored in one shard. `layer` is None before and after the layers."""

    number: int
    layer: int | None
    tensors: tuple[Tensor, ...]
    prefix: str  # prefix of the names of its tensors

    @property
    def title(self) -> str:
        if self.layer is not None:
            return f"layer {self.layer}"
        return "embedding" if self.number == 0 else "head"

    def short(self, name: str) -> str:
        """Return a name without the layer's prefix."""
        return name.removeprefix(self.prefix)


class QuantizedPart(NamedTuple):
    """A method's result for one part: a reader of its floats, and the integers of matrices that the method rounded.

    `kept` reads rows of matrices whose integers and scales come from the source.
    """

    read: ReadRows
    rounded: Mapping[str, IntMatrix]
    output_errors: Mapping[str, float]
    kept: Mapping[str, Callable[[slice], IntegerRows]] = {}


def parts_of(model: ModelSpec) -> list[WeightPart]:
    """Split a model into the embedding, its layers in order, and the rest."""
    groups: dict[int, list[Tensor]] = {index: [] for index in range(-1, len(model.layers) + 1)}
    prefix, own_inputs = f"{model.prefix}layers.", f"{model.prefix}per_layer_"
    for tensor in model.tensors():
        if tensor.name.startswith(prefix):
            groups[int(tensor.name.removeprefix(prefix).partition(".")[0])].append(tensor)
        else:
            first = tensor.role == "embedding" or tensor.name.startswith(own_inputs)
            groups[-1 if first else len(model.layers)].append(tensor)
    last = len(model.layers)
    return [
        WeightPart(index, key, tuple(tensors), f"{prefix}{key}.")
        if 0 <= key < last
        else WeightPart(index, None, tuple(tensors), "")
        for index, (key, tensors) in enumerate(sorted(groups.items()))
    ]


def largest_layer_bytes(model: ModelSpec) -> int:
    """Return the bytes of the largest layer in float32."""
    return 4 * max(sum(tensor.size for tensor in part.tensors) for part in parts_of(model)[1:-1])


def held_as_one(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group the linears among `tensors` that read the same inputs."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_linear:
            groups.setdefault(tensor.stack, []).append(tensor)
    return list(groups.values())


def shard_name(index: int, count: int) -> str:
    """Return the file name of a part."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def layout_of(part: WeightPart, model: ModelSpec, recipe: Recipe) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of every tensor in the shard of a part, by its name on the disk."""
    stored = (item for tensor in part.tensors for item in stored_as(tensor, recipe.format_of(tensor)))
    return {on_disk(model, item.name): (item.dtype, item.shape) for item in stored}


def reader(source: SourceTensors, model: ModelSpec, device: torch.device | None = None) -> ReadRows:
    """Return a reader of the source's tensors as float32, onto `device`; None: the processor."""
    import torch

    read_array = array_reader(source, model)

    def read(name: str, rows: slice | None = None) -> torch.Tensor:
        return torch.from_numpy(read_array(name, rows)).to(device)

    return read


def array_reader(source: SourceTensors, model: ModelSpec) -> ReadRows:
    """Return a reader of the source's tensors as arrays, without torch."""
    shapes = {tensor.name: tensor.shape for tensor in model.tensors()}

    def read(name: str, rows: slice | None = None) -> Any:
        shape = source.entry(name).shape
        if shape != shapes[name]:
            raise InvalidInput(f"tensor {quote_short(name)} has shape {shape}, the config asks for {shapes[name]}")
        values = source.floats(name, rows)
        if not np.isfinite(values).all():
            near = f", near row {rows.start}" if rows else ""
            raise InvalidInput(f"tensor {quote_short(name)}: holds values that are not finite{near}")
        return values

    return read


def as_array(values: Any) -> Any:
    """Return an array of a tensor on any device, or the array itself."""
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


def write_part(
    path: Path,
    part: WeightPart,
    model: ModelSpec,
    recipe: Recipe,
    choice: QuantizedPart,
    release: Callable[[str], None] = lambda name: None,
) -> dict[str, Statistics]:
    """Store a part and return its statistics by module.

    Matrices for which `choice` has integers are stored as they are, other matrices are rounded to nearest.
    `release` is called with the name of each tensor after it was read.
    """
    formats = {tensor.name: recipe.format_of(tensor) for tensor in part.tensors}
    stored = (item.name for tensor in part.tensors for item in stored_as(tensor, formats[tensor.name]))
    names = {name: on_disk(model, name) for name in stored}
    statistics: dict[str, Statistics] = {}
    with TensorWriter(path, layout_of(part, model, recipe)) as writer:
        for tensor in part.tensors:
            target = formats[tensor.name]
            if target.is_float:
                _write_floats(writer, names, tensor, target, choice.read)
            else:
                error = _write_matrix(writer, names, tensor, target, choice)
                statistics[tensor.module] = Statistics(
                    weight_error=error, output_error=choice.output_errors.get(tensor.module)
                )
            release(tensor.name)
        noted = {name: item.model_dump() for name, item in statistics.items()}
        write_file(_statistics_path(path), json.dumps(noted).encode())
        writer.seal()
    return statistics


def _write_floats(
    writer: TensorWriter, names: Mapping[str, str], tensor: Tensor, stored: Format, read: ReadRows
) -> None:
    rows = tensor.shape[0]
    width = int(np.prod(tensor.shape[1:], dtype=np.int64))
    for block in blocks(rows, width):
        values = as_array(read(tensor.name, block))
        writer.write(names[tensor.name], as_stored(values, stored, tensor.name), block.start)


def as_stored(values: NDArray[np.float32], stored: Format, name: str) -> NDArray[Any]:
    """Return floats in the type of `stored`. Raises `InvalidInput` if a value does not fit it."""
    if stored.kind == "float32":
        return values
    if stored.kind == "bfloat16":
        return float32_to_bf16(values)
    if values.size and np.abs(values).max() > np.finfo(np.float16).max:
        raise InvalidInput(
            f"tensor {quote_short(name)}: {np.abs(values).max():g} does not fit {FLOAT_DTYPES[stored.kind]}; "
            "give the recipe `float_format: {kind: bfloat16}`"
        )
    return values.astype(np.float16)


def scales_as_stored(scales: NDArray[np.float32], stored: Format) -> NDArray[Any]:
    """Return scales in the type that the format stores, which holds them exactly."""
    if stored.scales in (None, "bfloat16"):
        return float32_to_bf16(scales)
    return scales if stored.scales == "float32" else scales.astype(np.float16)


def _write_matrix(
    writer: TensorWriter, names: Mapping[str, str], tensor: Tensor, stored: Format, choice: QuantizedPart
) -> float:
    outputs, inputs = tensor.shape
    rounded, kept = choice.rounded.get(tensor.module), choice.kept.get(tensor.module)

    def write(block: slice) -> tuple[float, float]:
        weights = as_array(choice.read(tensor.name, block))
        refuse_unstorable(weights, stored, tensor.name, block.start)
        if kept is not None:
            chosen = kept(block)
        elif rounded is None:
            chosen = round_rows(weights, stored)
        else:
            chosen = IntegerRows(*(as_array(each[block]) for each in rounded))
        packed, scales = pack(chosen.integers, bits_of(stored)), scales_as_stored(chosen.scales, stored)
        writer.write(names[f"{tensor.module}.weight_packed"], packed, block.start)
        writer.write(names[f"{tensor.module}.weight_scale"], scales, block.start)
        if chosen.minima is not None:
            minima = scales_as_stored(chosen.minima, stored)
            writer.write(names[f"{tensor.module}.weight_minimum"], minima, block.start)
        lost = chosen.dequantised() - weights
        return float(np.square(lost).sum()), float(np.square(weights).sum())

    lost, whole = zip(*in_parallel(write, blocks(outputs, inputs)), strict=True)
    writer.write(names[f"{tensor.module}.weight_shape"], np.array([outputs, inputs], np.int64))
    return math.fsum(lost) / (math.fsum(whole) or 1.0)


def is_written(shard: Path) -> bool:
    """Return True if `write_part` has finished a shard."""
    return shard.exists() and _statistics_path(shard).exists()


def _statistics_path(shard: Path) -> Path:
    return shard.with_name(f".{shard.name}.statistics")


def read_statistics(shard: Path) -> dict[str, Statistics]:
    """Read the statistics that `write_part` wrote before it sealed a shard."""
    stored = json.loads(_statistics_path(shard).read_bytes())
    return {name: Statistics(**item) for name, item in stored.items()}


def remove_working_files(folder: Path) -> None:
    """Remove what a run leaves in the folder of finished weights: statistics, and unfinished files of a killed run."""
    for path in folder.glob(".*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_index(folder: Path, shards: Sequence[str]) -> None:
    """Write the index that maps each tensor to its shard."""
    weight_map: dict[str, str] = {}
    total = 0
    for shard in shards:
        for name, entry in read_header(folder / shard).items():
            weight_map[name] = shard
            total += entry.bytes
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    write_file(folder / INDEX, text.encode())


def tools() -> dict[str, str]:
    """Return the versions of everything that the integers depend on."""
    return {**versions_of(("edgekit", "torch")), "python": platform.python_version()}
