"""Loads the weights of an artifact, after checking every tensor against the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from edgekit.common.parsing import read_json
from edgekit.contracts.neutral import on_disk
from edgekit.errors import DamagedArtifact, InvalidInput, quote_short
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.spec import ModelSpec
from edgekit_mlx.layout import WEIGHTS, MlxPacking, file_tensors, module_names, module_on_disk, stored_tensors

LAYER_INPUTS = "model.embed_tokens_per_layer"
_BITS, _GROUPS, _MODES = (2, 3, 4, 5, 6, 8), (16, 32, 64, 128), ("affine", "mxfp4", "nvfp4")
_FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


class MlxMatrix(NamedTuple):
    """The weights of one module, which products use without unpacking."""

    weight: mx.array
    scales: mx.array | None
    biases: mx.array | None
    packing: MlxPacking | None
    bias: mx.array | None

    def __call__(self, inputs: mx.array) -> mx.array:
        if self.packing is None or self.scales is None:
            product = inputs @ self.weight.T
        else:
            product = mx.quantized_matmul(inputs, self.weight, self.scales, self.biases, True, *self._options())
        return product if self.bias is None else product + self.bias

    def of_experts(self, inputs: mx.array, experts: mx.array) -> mx.array:
        """Return the products [tokens, chosen, 1, out] of inputs [tokens, 1 or chosen, 1, in] with a stack of matrices.

        `experts` [tokens, chosen] has the indices of each token's matrices.
        """
        if self.packing is None or self.scales is None:
            product = mx.gather_mm(inputs, self.weight.swapaxes(-1, -2), rhs_indices=experts)
        else:
            group, bits, mode = self._options()
            product = mx.gather_qmm(
                inputs, self.weight, self.scales, self.biases, rhs_indices=experts, transpose=True,
                group_size=group, bits=bits, mode=mode,
            )  # fmt: skip
        return product if self.bias is None else product + self.bias[experts][:, :, None]

    def rows(self, ids: mx.array) -> mx.array:
        """Return the rows of some token ids, as floats."""
        if self.packing is None or self.scales is None:
            return self.weight[ids]
        biases = None if self.biases is None else self.biases[ids]
        return mx.dequantize(self.weight[ids], self.scales[ids], biases, *self._options())

    def _options(self) -> tuple[int, int, str]:
        assert self.packing is not None
        return self.packing.group, self.packing.bits, self.packing.mode


class MappedTable:
    """A table of which a call reads a few rows. It stays in the mapped file, because MLX would copy all of it."""

    def __init__(self, files: Path, module: str, packing: MlxPacking | None, numbers: mx.Dtype) -> None:
        self._folder, self._module, self._packing, self._numbers = TensorFolder.open(files), module, packing, numbers

    def rows(self, ids: NDArray[np.int64]) -> mx.array:
        """Return the rows of some token ids, as floats."""
        weight, scales, biases = (self._read(part, ids) for part in ("weight", "scales", "biases"))
        assert weight is not None
        return MlxMatrix(weight, scales, biases, self._packing, None).rows(mx.arange(len(ids)))

    def _read(self, part: str, ids: NDArray[np.int64]) -> mx.array | None:
        name = f"{self._module}.{part}"
        entry = self._folder.entries.get(name)
        if entry is None:
            return None
        if entry.dtype in ("U32", "U8"):
            return mx.array(self._folder.array(name, ids))
        return mx.array(self._folder.floats(name, ids)).astype(self._numbers)


class Weights:
    """Matrices and norms by their names in the file. Floats have the type of the activations."""

    def __init__(self, model: ModelSpec, files: Path, *, numbers: mx.Dtype | None) -> None:
        packed = _packings(model, files)
        floats = _check(model, files, packed)
        self.numbers = numbers or _FLOATS[floats]
        arrays = mx.load(str(files / WEIGHTS))
        assert isinstance(arrays, dict)
        self.layer_inputs: MappedTable | None = None
        if model.per_layer_input is not None:
            self.layer_inputs = MappedTable(files / WEIGHTS, LAYER_INPUTS, packed.pop(LAYER_INPUTS), self.numbers)
            for name in [name for name in arrays if name.startswith(f"{LAYER_INPUTS}.")]:
                del arrays[name]  # loaded when it is first used, so never
        # Under the model's names, from which the file's differ in some families; stacks of experts under the file's.
        names = {
            module_on_disk(model, each.tensor): module_on_disk(model, each.parts[0])
            for each in file_tensors(model)
            if not each.tensor.is_of_expert
        }
        self.matrices = {
            names.get(module, module): self._matrix(arrays, module, packing) for module, packing in packed.items()
        }
        self.norms = {
            module_on_disk(model, tensor): self._norm(model, arrays.pop(on_disk(model, tensor.name)))
            for tensor in model.tensors()
            if tensor.role in ("norm", "buffer", "router")
        }
        # Vectors and convolutions of recurrent layers, in float32.
        self.others = {
            name: arrays.pop(name).astype(mx.float32)
            for name in [on_disk(model, tensor.name) for tensor in model.tensors() if tensor.role in ("other", "bias")]
            if name in arrays
        }
        assert not arrays, f"not used: {list(arrays)[:3]}"
        mx.eval(*(array for array in self.arrays()))

    def arrays(self) -> list[mx.array]:
        """Return all arrays."""
        parts = [part for matrix in self.matrices.values() for part in matrix if isinstance(part, mx.array)]
        return [*parts, *self.norms.values(), *self.others.values()]

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())

    def _matrix(self, arrays: dict[str, mx.array], module: str, packing: MlxPacking | None) -> MlxMatrix:
        def part(name: str) -> mx.array | None:
            array = arrays.pop(f"{module}.{name}", None)
            return array if array is None or array.dtype in (mx.uint32, mx.uint8) else array.astype(self.numbers)

        weight = part("weight")
        assert weight is not None
        return MlxMatrix(weight, part("scales"), part("biases"), packing, part("bias"))

    def _norm(self, model: ModelSpec, array: mx.array) -> mx.array:
        # Keep 1 + w in float32, since 16 bits would round a small w away.
        return 1.0 + array.astype(mx.float32) if model.norm_offset else array.astype(self.numbers)


def _packings(model: ModelSpec, files: Path) -> dict[str, MlxPacking | None]:
    """Return the packing of every module from `config.json`."""
    path = files / "config.json"
    quantization = read_json(path).get("quantization") or {}
    if not isinstance(quantization, dict):
        raise InvalidInput(f"{path}: quantization: {quote_short(quantization)} is not an object; export again")
    packings: dict[str, MlxPacking | None] = {}
    for module in module_names(model):
        entry = quantization.get(module, quantization or False)
        packings[module] = _packing(entry, f"{path}: quantization of {module}") if entry else None
    return packings


def _packing(entry: Any, where: str) -> MlxPacking:
    bits, group = (entry.get("bits"), entry.get("group_size")) if isinstance(entry, dict) else (None, None)
    mode = entry.get("mode", "affine") if isinstance(entry, dict) else None
    if bits not in _BITS or group not in _GROUPS or mode not in _MODES:
        raise InvalidInput(f"{where}: {quote_short(entry)} is not an MLX packing; export again")
    return MlxPacking(bits, group, mode)


def _check(model: ModelSpec, files: Path, packed: dict[str, MlxPacking | None]) -> str:
    """Return the type of the file's floats; raise DamagedArtifact unless its tensors are exactly the model's."""
    with TensorFolder.open(files / WEIGHTS if (files / WEIGHTS).is_file() else files) as folder:
        entries = dict(folder.entries)
    floats = next((entry.dtype for name, entry in entries.items() if name.endswith("norm.weight")), "none")
    if floats not in _FLOATS:
        raise DamagedArtifact(f"{files / WEIGHTS}: norms are stored as {floats}; export again")
    for name, (dtype, shape) in stored_tensors(model, packed, floats).items():
        entry = entries.pop(name, None)
        if entry is None or (entry.dtype, entry.shape) != (dtype, shape):
            actual = "is missing" if entry is None else f"is {entry.dtype} {list(entry.shape)}"
            raise DamagedArtifact(
                f"{files / WEIGHTS}: tensor {quote_short(name)} {actual}, expected {dtype} {list(shape)}; export again"
            )
    if entries:
        raise DamagedArtifact(
            f"{files / WEIGHTS}: tensor {quote_short(next(iter(entries)))} belongs to no module of the model"
        )
    return floats
