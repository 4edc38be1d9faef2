"""Writes neutral weights as folders of other engines: MLX's format, Olive's for genai.

MLX and Olive keep the same integers and scales; tensors that their formats cannot hold are written in float.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit import NeutralWeights, TensorWriter
from edgekit.common.files import write_file
from edgekit.common.parsing import read_json
from edgekit.contracts.neutral import bits_of, on_disk
from edgekit.errors import Unsupported

_FILE = "model.safetensors"
_TYPES = {"float32": "F32", "uint32": "U32", "uint8": "U8"}  # by safetensors' names
_OLIVE_GROUPS = (32, 64, 128)


def write_mlx(weights: NeutralWeights, folder: Path) -> None:
    """Write MLX's affine quantisation: the same bytes, with `scales = s` and `biases = -8 s` (or -128 s) in float32."""
    formats: dict[str, Any] = {}

    def tensors() -> Iterator[tuple[str, NDArray[Any]]]:
        for tensor in weights.model.tensors():
            name = on_disk(weights.model, tensor.name)
            module = name.removesuffix(".weight")
            if tensor.module not in weights.modules() or weights.format_of(tensor.module).is_float:
                yield name, weights.floats(tensor.name)
                continue
            bits = bits_of(weights.format_of(tensor.module))
            group, scales = _grouped(weights, tensor.module, tensor.shape[1])
            formats[module] = {"group_size": group, "bits": bits}
            yield name, np.ascontiguousarray(weights.packed(tensor.module)).view(np.uint32)
            yield f"{module}.scales", scales
            yield f"{module}.biases", -scales * (1 << (bits - 1))

    _write_tensors(folder, tensors())
    common = next(iter(formats.values()), None)
    _write_config(weights, folder, {"quantization": {**common, **formats}} if common else {})


def write_olive(weights: NeutralWeights, folder: Path) -> None:
    """Write Olive's layout of 4-bit linears, whose integers genai's builder uses unchanged.

    Embedding and head are written in float, because the builder would round them again.
    """
    groups = {weights.format_of(module).group for module in weights.modules() if _is_olive(weights, module)}
    if len(groups) != 1 or not groups <= set(_OLIVE_GROUPS):
        raise Unsupported(
            f"onnxruntime-genai: its builder takes one 4-bit group for all linears, recipe {weights.recipe.name} has "
            f"{sorted(map(str, groups)) or 'none'}; leave this peer out, or export with --recipe s4-g32"
        )

    def tensors() -> Iterator[tuple[str, NDArray[Any]]]:
        for tensor in weights.model.tensors():
            name = on_disk(weights.model, tensor.name)
            if not _is_olive(weights, tensor.module) or not name.endswith(".weight"):
                yield name, weights.tensor(tensor.name)
                continue
            module = name.removesuffix(".weight")
            yield f"{module}.qweight", np.ascontiguousarray(weights.packed(tensor.module))
            yield f"{module}.scales", weights.scales(tensor.module)

    _write_tensors(folder, tensors())
    quantisation = {"quant_method": "olive", "bits": 4, "group_size": groups.pop(), "symmetric": True, "overrides": {}}
    _write_config(weights, folder, {"quantization_config": quantisation, "dtype": "float32", "torch_dtype": "float32"})


def _is_olive(weights: NeutralWeights, module: str) -> bool:
    if module not in weights.modules():
        return False
    role = weights.tensor_of(module).role
    return role == "linear" and weights.format_of(module).kind == "s4"


def _grouped(weights: NeutralWeights, module: str, inputs: int) -> tuple[int, NDArray[np.float32]]:
    """Return scales for MLX, which needs groups: the scale of an 8-bit row is repeated."""
    group = weights.format_of(module).group or next((each for each in (128, 64, 32) if inputs % each == 0), 0)
    if not group:
        raise Unsupported(f"mlx-lm: rows of {inputs} values ({module}) cannot be divided into groups of 32, 64 or 128")
    scales = weights.scales(module)
    return group, np.ascontiguousarray(np.broadcast_to(scales, (scales.shape[0], inputs // group)))


def _write_tensors(folder: Path, tensors: Iterator[tuple[str, NDArray[Any]]]) -> None:
    """Write all tensors from memory: a benchmarked model fits this machine."""
    matrices = dict(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    described = {name: (_TYPES[values.dtype.name], values.shape) for name, values in matrices.items()}
    with TensorWriter(folder / _FILE, described) as file:
        for name, values in matrices.items():
            file.write(name, values)
        file.seal()


def _write_config(weights: NeutralWeights, folder: Path, update: dict[str, Any]) -> None:
    config = read_json(weights.folder / "config.json")
    config.pop("quantization_config", None)
    write_file(folder / "config.json", (json.dumps(config | update, indent=1) + "\n").encode())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (weights.folder / name).exists():
            write_file(folder / name, (weights.folder / name).read_bytes())
