"""Readers of quantised matrices in safetensors from other tools: compressed-tensors, GPTQ and MLX.

Integers and scales are read unchanged. Only integer × scale is supported: zero points, column orders and other extras
are refused with the tensor's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Self, get_args

import numpy as np

from edgekit.errors import InvalidInput, Unsupported, quote_short
from edgekit.formats.int_packing import (
    DerivedEntry,
    IntegerFormat,
    IntegerRows,
    ScaleType,
    held_group,
    row_bytes,
    unpack,
)
from edgekit.formats.quant_scheme import QuantLayout, QuantScheme, StoredGroups
from edgekit.formats.safetensors import TensorEntry, TensorFolder

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_PROBED_ROWS = 4  # of every matrix, read when a model is opened, to refuse a zero point before any work
_MAX_INPUTS = 1 << 24
_MAX_SCALE = 2.0**64  # far above any weight, far below what would overflow in a product


class _Matrix(NamedTuple):
    """A quantised matrix in its file: `group` values of a row share a scale."""

    module: str
    outputs: int
    inputs: int
    bits: int
    group: int
    held: IntegerFormat
    parts: tuple[str, ...]


class DerivedTensors:
    """The tensors that `entries` names: stored ones of a folder, and others that are made from those."""

    def __init__(self, folder: TensorFolder) -> None:
        self._folder, self.files = folder, folder.files
        self._where = next(iter(folder.files.values())).parent
        self.entries: dict[str, TensorEntry | DerivedEntry] = dict(folder.entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap all files that no array refers to."""
        self._folder.close()

    def entry(self, name: str) -> TensorEntry | DerivedEntry:
        """Return the type and shape of a tensor. Raises `InvalidInput` for a missing one."""
        return self.entries[name] if name in self.entries else self._folder.entry(name)


class QuantisedTensors(DerivedTensors):
    """The tensors of a folder whose matrices are quantised, under the names of the float model.

    Has the methods of `TensorFolder` that quantisers and references use; `floats` dequantises.
    """

    def __init__(self, folder: TensorFolder, scheme: QuantScheme) -> None:
        super().__init__(folder)
        self._scheme = scheme
        found = _FINDERS[scheme.layout](self._where, folder, scheme)
        self._matrices = {f"{matrix.module}.weight": matrix for matrix in found}
        for name, matrix in self._matrices.items():
            size = sum(self.entries.pop(part).bytes for part in matrix.parts)
            if name in self.entries:
                raise InvalidInput(
                    f"{self._where}: tensor {quote_short(name)} is stored twice; quantise the model again"
                )
            self.entries[name] = DerivedEntry(scheme.name, (matrix.outputs, matrix.inputs), size)
        self.integer_formats = {name: matrix.held for name, matrix in self._matrices.items()}
        for matrix in self._matrices.values():
            self._check(matrix, slice(0, min(_PROBED_ROWS, matrix.outputs)))

    def floats(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        """Return a tensor, or some of its rows, as float32; a quantised one is dequantised."""
        return self.integers(name, rows).dequantised() if name in self._matrices else self._folder.floats(name, rows)

    def integers(self, name: str, rows: slice | None = None) -> IntegerRows:
        """Return the integers and scales of a quantised matrix, or of some of its rows."""
        matrix, rows = self._matrices[name], rows or slice(None)
        self._check(matrix, rows)
        found = _READERS[self._scheme.layout](self._folder, matrix, rows)
        if not (np.abs(found.scales) <= _MAX_SCALE).all():  # NaN fails too
            raise InvalidInput(
                f"{self._where}: {quote_short(name)}: holds a scale that is not finite or above 2^64; is it damaged?"
            )
        repeats = matrix.group // (matrix.held.group or matrix.group)
        return found if repeats == 1 else found._replace(scales=np.repeat(found.scales, repeats, axis=1))

    def _check(self, matrix: _Matrix, rows: slice) -> None:
        """Raise `Unsupported` if rows of a matrix are not just integer × scale."""
        if self._scheme.layout == "gptq":
            _check_gptq(self._where, self._folder, matrix, rows, self._scheme.zero)
        elif self._scheme.layout == "mlx":
            _check_mlx(self._where, self._folder, matrix, rows)

    def release(self, name: str) -> None:
        """Return the mapped pages of a tensor to the system; the next access reads them again."""
        for part in self._matrices[name].parts if name in self._matrices else (name,):
            self._folder.release(part)


def _matrix(
    where: Path, module: str, shape: tuple[int, int], stored: StoredGroups, scales: TensorEntry, parts: tuple[str, ...]
) -> _Matrix:
    """Check shapes and the type of scales, and describe the matrix."""
    (outputs, inputs), group = shape, stored.group or shape[1]
    what = f"{where}: {quote_short(module)}"
    if scales.dtype not in get_args(ScaleType):
        raise Unsupported(f"{what}: scales of type {scales.dtype}; {', '.join(get_args(ScaleType))} are read")
    if not 0 < inputs <= _MAX_INPUTS or outputs < 1 or inputs % group:
        raise InvalidInput(f"{what}: rows of {inputs:,} values, which groups of {group} do not fill; correct the file")
    try:
        held = held_group(stored.bits, group, inputs)
    except ValueError as error:
        raise Unsupported(f"{what}: has {error}; give the float model") from None
    return _Matrix(module, outputs, inputs, stored.bits, group, IntegerFormat(stored.bits, held, scales.dtype), parts)  # type: ignore[arg-type]


def _expect(where: Path, folder: TensorFolder, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    entry = folder.entry(name)
    if entry.dtype not in dtypes or entry.shape != shape:
        raise InvalidInput(
            f"{where}: tensor {quote_short(name)} is {entry.dtype} {list(entry.shape)}, expected {' or '.join(dtypes)} "
            f"{list(shape)}; correct the file or its config.json"
        )


def _modules(folder: TensorFolder, suffix: str) -> Iterator[str]:
    return (name.removesuffix(suffix) for name in folder.entries if name.endswith(suffix))


# --- compressed-tensors, pack-quantized: rows of value + 8 or + 128, low bits first, padded to 32-bit words


def _find_compressed(where: Path, folder: TensorFolder, scheme: QuantScheme) -> Iterator[_Matrix]:
    """Find the matrices by their tensors; the config's patterns for modules are not evaluated."""
    for surplus in ("weight_zero_point", "weight_g_idx"):
        for module in _modules(folder, f".{surplus}"):
            kind = "a zero point" if surplus == "weight_zero_point" else "an order of activation"
            raise Unsupported(f"{where}: {quote_short(module)}.{surplus}: {kind} is not read; give the float model")
    for module in _modules(folder, ".weight_packed"):
        parts = tuple(f"{module}.{part}" for part in ("weight_packed", "weight_scale", "weight_shape"))
        packed, scales = (folder.entry(part) for part in parts[:2])
        _expect(where, folder, parts[2], ("I64", "I32"), (2,))
        if packed.dtype != "I32" or len(packed.shape) != 2 or len(scales.shape) != 2:
            raise InvalidInput(f"{where}: {quote_short(parts[0])} is {packed.dtype} {list(packed.shape)}, not I32 rows")
        outputs, inputs = (int(size) for size in folder.array(parts[2]))
        for stored in scheme.groups:
            words = row_bytes(inputs, stored.bits) // 4 if 0 < inputs <= _MAX_INPUTS else -1
            if packed.shape != (outputs, words) or scales.shape != (outputs, inputs // (stored.group or inputs)):
                continue
            yield _matrix(where, module, (outputs, inputs), stored, scales, parts)
            break
        else:
            raise InvalidInput(
                f"{where}: {quote_short(module)}: weight_packed {list(packed.shape)}, weight_scale "
                f"{list(scales.shape)} and weight_shape [{outputs}, {inputs}] fit no config group; correct the file"
            )


def _read_rows(folder: TensorFolder, matrix: _Matrix, rows: slice) -> IntegerRows:
    """Read packed rows, in which compressed-tensors and MLX agree."""
    packed = np.ascontiguousarray(folder.array(matrix.parts[0], rows)).view(np.uint8)
    return IntegerRows(unpack(packed, matrix.bits, matrix.inputs), folder.floats(matrix.parts[1], rows))


# --- GPTQ: columns of words along the input, scales and zero points [groups, out], groups by g_idx


def _find_gptq(where: Path, folder: TensorFolder, scheme: QuantScheme) -> Iterator[_Matrix]:
    stored = scheme.groups[0]
    for module in _modules(folder, ".qweight"):
        entry, scales = folder.entry(f"{module}.qweight"), folder.entry(f"{module}.scales")
        if entry.dtype != "I32" or len(entry.shape) != 2 or entry.shape[0] > _MAX_INPUTS:
            raise InvalidInput(f"{where}: {quote_short(module)}.qweight is {entry.dtype} {list(entry.shape)}, not I32")
        inputs, outputs = entry.shape[0] * 32 // stored.bits, entry.shape[1]
        groups = inputs // (stored.group or max(1, inputs))
        parts = [f"{module}.{part}" for part in ("qweight", "scales", "qzeros")]
        _expect(where, folder, parts[1], get_args(ScaleType), (groups, outputs))
        _expect(where, folder, parts[2], ("I32",), (groups, math.ceil(outputs * stored.bits / 32)))
        if f"{module}.g_idx" in folder.entries:
            parts.append(f"{module}.g_idx")
            _expect(where, folder, parts[3], ("I32", "I64"), (inputs,))
        yield _matrix(where, module, (outputs, inputs), stored, scales, tuple(parts))


def _check_gptq(where: Path, folder: TensorFolder, matrix: _Matrix, rows: slice, zero: int) -> None:
    start, stop, _ = rows.indices(matrix.outputs)
    each = 32 // matrix.bits
    words = folder.array(matrix.parts[2])[:, start // each : math.ceil(stop / each)]
    zeros = np.ascontiguousarray(words).view(np.uint8)
    if not (zeros == (zero * 17 if matrix.bits == 4 else zero)).all():  # two of four bits in a byte
        raise Unsupported(
            f"{where}: {quote_short(matrix.parts[2])}: holds zero points that differ from the middle, though the "
            "config says symmetric; give the float model"
        )
    if len(matrix.parts) > 3 and start == 0:
        order = folder.array(matrix.parts[3])
        if not np.array_equal(order, np.arange(matrix.inputs) // matrix.group):
            raise Unsupported(
                f"{where}: {quote_short(matrix.parts[3])}: columns are stored in order of activation, which is not "
                "read; give the float model, or one quantised with desc_act false"
            )


def _read_gptq(folder: TensorFolder, matrix: _Matrix, rows: slice) -> IntegerRows:
    packed = np.ascontiguousarray(folder.array(matrix.parts[0])[:, rows].T).view(np.uint8)
    scales = np.ascontiguousarray(folder.floats(matrix.parts[1])[:, rows].T)
    return IntegerRows(unpack(packed, matrix.bits, matrix.inputs), scales)


# --- MLX affine: scale × unsigned integer + bias, where the bias is -8 or -128 scales


def _find_mlx(where: Path, folder: TensorFolder, scheme: QuantScheme) -> Iterator[_Matrix]:
    for module in _modules(folder, ".scales"):
        stored = scheme.modules.get(module, scheme.groups[0])
        parts = tuple(f"{module}.{part}" for part in ("weight", "scales", "biases"))
        weight, scales = folder.entry(parts[0]), folder.entry(parts[1])
        if stored is None or weight.dtype != "U32" or len(weight.shape) != 2:
            raise InvalidInput(
                f"{where}: tensor {quote_short(parts[0])} is {weight.dtype} {list(weight.shape)} with scales; "
                "config.json and file disagree"
            )
        inputs = weight.shape[1] * 32 // stored.bits
        shape = (weight.shape[0], inputs // (stored.group or inputs or 1))
        _expect(where, folder, parts[1], get_args(ScaleType), shape)
        _expect(where, folder, parts[2], (scales.dtype,), shape)
        yield _matrix(where, module, (weight.shape[0], inputs), stored, scales, parts)


def _check_mlx(where: Path, folder: TensorFolder, matrix: _Matrix, rows: slice) -> None:
    scales, biases = (folder.floats(part, rows) for part in matrix.parts[1:])
    middle = np.float32(1 << (matrix.bits - 1))
    with np.errstate(over="ignore", invalid="ignore"):
        is_symmetric = np.array_equal(biases, -middle * scales)
    if not is_symmetric:
        raise Unsupported(
            f"{where}: {quote_short(matrix.module)}: a bias is not -{middle:.0f} scales, so zero is no integer; "
            "give the float model"
        )


_FINDERS: dict[QuantLayout, Callable[[Path, TensorFolder, QuantScheme], Iterator[_Matrix]]] = {
    "compressed-tensors": _find_compressed,
    "gptq": _find_gptq,
    "mlx": _find_mlx,
}
_READERS: dict[QuantLayout, Callable[[TensorFolder, _Matrix, slice], IntegerRows]] = {
    "compressed-tensors": _read_rows,
    "gptq": _read_gptq,
    "mlx": _read_rows,
}
