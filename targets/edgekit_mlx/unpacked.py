"""Reads the weights back from an exported folder, as MLX uses them. Needs no mlx."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekit.common.parsing import read_json
from edgekit.contracts.neutral import is_module, on_disk
from edgekit.contracts.plan import Plan
from edgekit.errors import DamagedArtifact, Unsupported, quote_short
from edgekit.formats.int_packing import in_slices, unpack_words
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor
from edgekit_mlx.layout import file_tensors, module_on_disk
from edgekit_mlx.native import FP4_MODES, fp4_values

Floats = NDArray[np.float32]


def weights(plan: Plan, files: Path) -> Iterator[tuple[str, Floats]]:
    """Yield every tensor of the model by its name: scale × integer + bias, as the folder's `config.json` states."""
    config = read_json(files / "config.json")
    rules = config.get("quantization") or {}
    with TensorFolder.open(files) as tensors:
        for whole, tensor, mine in _parts(plan.model):
            name, module = on_disk(plan.model, whole.name), module_on_disk(plan.model, whole)
            if not is_module(tensor) or f"{module}.scales" not in tensors.entries:
                yield tensor.name, tensors.floats(name, mine).reshape(tensor.shape)
                continue
            rule = rules.get(module, rules)
            mode = rule.get("mode", "affine") if isinstance(rule, dict) else rule
            if mode not in ("affine", *FP4_MODES):
                raise Unsupported(f"mlx: {module} is packed as {quote_short(mode)}, which is not read back")
            bits = rule.get("bits")
            if type(bits) is not int or not 2 <= bits <= 8:
                raise DamagedArtifact(f"{files / 'config.json'}: {module} has {bits} bits")
            words = (tensors.array(name) if mine is None else tensors.array(name)[mine]).reshape(tensor.shape[0], -1)
            if mode in FP4_MODES:
                codes = tensors.array(f"{module}.scales") if mine is None else tensors.array(f"{module}.scales")[mine]
                values = unpack_words(words, bits)
                yield tensor.name, fp4_values(values, codes.reshape(tensor.shape[0], -1), mode).reshape(tensor.shape)
                continue
            scales, biases = (
                tensors.floats(f"{module}.{part}", mine).reshape(tensor.shape[0], -1) for part in ("scales", "biases")
            )
            count = words.shape[1] * 32 // bits
            if count % scales.shape[1] or (len(words), count) != tensor.shape:
                raise DamagedArtifact(f"{files}: {module} has {len(words), count} values and {scales.shape} scales")
            yield tensor.name, _affine(words, bits, scales, biases)


def _affine(words: NDArray[np.uint32], bits: int, scales: Floats, biases: Floats) -> Floats:
    """Return scale × integer + bias."""
    # Of symmetric integers the bias is the middle times the scale: subtracted before scaling, it is exact.
    middle = np.float32(1 << (bits - 1))
    is_symmetric = np.array_equal(biases, -middle * scales)

    def dequantised(rows: slice) -> Floats:
        grouped = unpack_words(words[rows], bits).reshape(*scales[rows].shape, -1).astype(np.float32)
        if is_symmetric:
            grouped = (grouped - middle) * scales[rows, :, None]
        else:
            grouped = grouped * scales[rows, :, None] + biases[rows, :, None]
        return grouped.reshape(len(grouped), -1)

    return in_slices(np.empty((len(words), words.shape[1] * 32 // bits), np.float32), dequantised)


def _parts(model: ModelSpec) -> Iterator[tuple[Tensor, Tensor, slice | None]]:
    """Yield each tensor of the file with a tensor of the model, and its index in a stack of experts."""
    for whole, parts in file_tensors(model):
        for index, tensor in enumerate(parts):
            yield whole, tensor, slice(index, index + 1) if tensor.is_of_expert else None
