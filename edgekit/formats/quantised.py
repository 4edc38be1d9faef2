"""Readers of quantised matrices in safetensors from other tools: compressed-tensors, GPTQ, AWQ and MLX.

Integers, scales and MLX's biases are read unchanged; zero points times the scale become what a group adds. Column
orders and other extras are refused with the tensor's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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
    row_slices,
    unpack_unsigned,
)
from edgekit.formats.quant_scheme import QuantLayout, QuantScheme, StoredGroups
from edgekit.formats.safetensors import TensorEntry, TensorFolder

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MAX_INPUTS = 1 << 24
_MAX_SCALE = 2.0**64  # far above any weight, far below what would overflow in a product


class _Matrix(NamedTuple):
    """A quantised matrix in its file: `group` values of a row share a scale. `weight` and others name its tensors."""

    module: str
    outputs: int
    inputs: int
    bits: int
    group: int
    held: IntegerFormat
    weight: str
    scales: str
    zeros: str | None  # zero points, or MLX's biases
    order: str | None = None  # each column's group
    shape: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(part for part in self[-5:] if part is not None)


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
        self._layout = _LAYOUTS[scheme.layout]
        found = self._layout.find(self._where, folder, scheme)
        self._matrices = {f"{matrix.module}.weight": self._with_minima(matrix) for matrix in found}
        for name, matrix in self._matrices.items():
            size = sum(self.entries.pop(part).bytes for part in matrix.parts)
            if name in self.entries:
                raise InvalidInput(
                    f"{self._where}: tensor {quote_short(name)} is stored twice; quantise the model again"
                )
            self.entries[name] = DerivedEntry(scheme.name, (matrix.outputs, matrix.inputs), size)
        self.integer_formats = {name: matrix.held for name, matrix in self._matrices.items()}

    def _with_minima(self, matrix: _Matrix) -> _Matrix:
        """Return the matrix with minima, unless the middle of its integers stands for zero in every group."""
        slices = row_slices((matrix.outputs, matrix.inputs // matrix.group))
        if matrix.zeros is None or all(self._is_symmetric(matrix, rows) for rows in slices):
            return matrix
        if matrix.held.group is None:
            raise Unsupported(
                f"{self._where}: {quote_short(matrix.module)}: a zero point for a whole row is not read; give the "
                "float model, or one quantised in groups"
            )
        return matrix._replace(held=matrix.held._replace(minima=True))

    def _is_symmetric(self, matrix: _Matrix, rows: slice) -> bool:
        scales, minima = self._groups(matrix, rows)
        with np.errstate(over="ignore", invalid="ignore"):
            return minima is None or np.array_equal(minima, scales * np.float32(-(1 << (matrix.bits - 1))))

    def _groups(self, matrix: _Matrix, rows: slice) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Return the scales and minima [rows, groups]; the minimum of a zero point is -zero point × scale."""
        scales = self._layout.scales(self._folder, matrix, rows)
        if matrix.zeros is None:
            return scales, None
        if self._layout.zeros is None:
            return scales, self._folder.floats(matrix.zeros, rows)
        zeros = self._layout.zeros(self._folder, matrix, rows) + np.int16(self._scheme.zero_less)
        with np.errstate(over="ignore", invalid="ignore"):
            return scales, scales * -zeros.astype(np.float32)

    def floats(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        """Return a tensor, or some of its rows, as float32; a quantised one is dequantised."""
        return self.integers(name, rows).dequantised() if name in self._matrices else self._folder.floats(name, rows)

    def integers(self, name: str, rows: slice | None = None) -> IntegerRows:
        """Return the integers and scales of a quantised matrix, or of some of its rows."""
        matrix, rows = self._matrices[name], rows or slice(None)
        unsigned = self._layout.unsigned(self._folder, matrix, rows)
        scales, minima = self._groups(matrix, rows)
        if not all((np.abs(each) <= _MAX_SCALE).all() for each in (scales, minima) if each is not None):  # NaN fails
            raise InvalidInput(
                f"{self._where}: {quote_short(name)}: holds a scale that is not finite or above 2^64; is it damaged?"
            )
        repeats = matrix.group // (matrix.held.group or matrix.group)
        if repeats > 1:
            scales = np.repeat(scales, repeats, axis=1)
            minima = None if minima is None else np.repeat(minima, repeats, axis=1)
        if matrix.held.minima:
            return IntegerRows(unsigned, scales, minima)
        return IntegerRows((unsigned - np.uint8(1 << (matrix.bits - 1))).view(np.int8), scales)

    def release(self, name: str) -> None:
        """Return the mapped pages of a tensor to the system; the next access reads them again."""
        for part in self._matrices[name].parts if name in self._matrices else (name,):
            self._folder.release(part)


def _matrix(
    where: Path,
    folder: TensorFolder,
    module: str,
    shape: tuple[int, int],
    stored: StoredGroups,
    parts: Mapping[str, str],
) -> _Matrix:
    """Check shapes and the type of scales, and describe the matrix; `parts` are the names of its tensors by field."""
    (outputs, inputs), group = shape, stored.group or shape[1]
    what, scales = f"{where}: {quote_short(module)}", folder.entry(parts["scales"])
    if scales.dtype not in get_args(ScaleType):
        raise Unsupported(f"{what}: scales of type {scales.dtype}; {', '.join(get_args(ScaleType))} are read")
    if not 0 < inputs <= _MAX_INPUTS or outputs < 1 or inputs % group:
        raise InvalidInput(f"{what}: rows of {inputs:,} values, which groups of {group} do not fill; correct the file")
    try:
        held = held_group(stored.bits, group, inputs)
    except ValueError as error:
        raise Unsupported(f"{what}: has {error}; give the float model") from None
    kind = IntegerFormat(stored.bits, held, scales.dtype)  # type: ignore[arg-type]
    present = {field: name for field, name in parts.items() if name in folder.entries}
    return _Matrix(module, outputs, inputs, stored.bits, group, kind, **({"zeros": None} | present))  # type: ignore[arg-type]


def _expect(where: Path, folder: TensorFolder, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    entry = folder.entry(name)
    if entry.dtype not in dtypes or entry.shape != shape:
        raise InvalidInput(
            f"{where}: tensor {quote_short(name)} is {entry.dtype} {list(entry.shape)}, expected {' or '.join(dtypes)} "
            f"{list(shape)}; correct the file or its config.json"
        )


def _scales_of_rows(folder: TensorFolder, matrix: _Matrix, rows: slice) -> NDArray[np.float32]:
    return folder.floats(matrix.scales, rows)


def _words_of_outputs(matrix: _Matrix, rows: slice) -> tuple[slice, slice]:
    """Return which words along the outputs hold these rows, and where the rows stand among all that they hold."""
    (start, stop, _), each = rows.indices(matrix.outputs), 32 // matrix.bits
    first = start // each
    return slice(first, math.ceil(stop / each)), slice(start - first * each, stop - first * each)


def _modules(folder: TensorFolder, suffix: str) -> Iterator[str]:
    return (name.removesuffix(suffix) for name in folder.entries if name.endswith(suffix))


# --- compressed-tensors, pack-quantized: rows of value + 8 or + 128, low bits first, padded to 32-bit words


def _find_compressed(where: Path, folder: TensorFolder, scheme: QuantScheme) -> Iterator[_Matrix]:
    """Find the matrices by their tensors; the config's patterns for modules are not evaluated."""
    for module in _modules(folder, ".weight_g_idx"):
        raise Unsupported(
            f"{where}: {quote_short(module)}.weight_g_idx: an order of activation is not read; give the float model"
        )
    for module in _modules(folder, ".weight_packed"):
        parts = {"weight": "packed", "scales": "scale", "shape": "shape", "zeros": "zero_point"}
        parts = {field: f"{module}.weight_{part}" for field, part in parts.items()}
        packed, scales = folder.entry(parts["weight"]), folder.entry(parts["scales"])
        _expect(where, folder, parts["shape"], ("I64", "I32"), (2,))
        if packed.dtype != "I32" or len(packed.shape) != 2 or len(scales.shape) != 2:
            raise InvalidInput(
                f"{where}: {quote_short(parts['weight'])} is {packed.dtype} {list(packed.shape)}, not I32 rows"
            )
        outputs, inputs = (int(size) for size in folder.array(parts["shape"]))
        for stored in scheme.groups:
            words = row_bytes(inputs, stored.bits) // 4 if 0 < inputs <= _MAX_INPUTS else -1
            if packed.shape != (outputs, words) or scales.shape != (outputs, inputs // (stored.group or inputs)):
                continue
            if parts["zeros"] in folder.entries:
                words = row_bytes(outputs, stored.bits) // 4
                _expect(where, folder, parts["zeros"], ("I32",), (words, scales.shape[1]))
            yield _matrix(where, folder, module, (outputs, inputs), stored, parts)
            break
        else:
            raise InvalidInput(
                f"{where}: {quote_short(module)}: weight_packed {list(packed.shape)}, weight_scale "
                f"{list(scales.shape)} and weight_shape [{outputs}, {inputs}] fit no config group; correct the file"
            )


def _rows_of_words(folder: TensorFolder, matrix: _Matrix, rows: slice) -> NDArray[np.uint8]:
    """Read packed rows, in which compressed-tensors and MLX agree."""
    packed = np.ascontiguousarray(folder.array(matrix.weight, rows)).view(np.uint8)
    return unpack_unsigned(packed, matrix.bits, matrix.inputs)


def _zeros_down(folder: TensorFolder, matrix: _Matrix, rows: slice) -> NDArray[np.int16]:
    """Read zero points that are packed along the outputs, plus 8 or 128 as the integers are."""
    words, places = _words_of_outputs(matrix, rows)
    packed = np.ascontiguousarray(folder.array(str(matrix.zeros), words).T).view(np.uint8)
    return unpack_unsigned(packed, matrix.bits, places.stop).T[places].astype(np.int16)


# --- GPTQ: columns of words along the input, scales and zero points [groups, out], groups by g_idx


def _find_gptq(where: Path, folder: TensorFolder, scheme: QuantScheme) -> Iterator[_Matrix]:
    stored = scheme.groups[0]
    for module in _modules(folder, ".qweight"):
        entry, each = folder.entry(f"{module}.qweight"), 32 // stored.bits
        if entry.dtype != "I32" or len(entry.shape) != 2 or entry.shape[0] > _MAX_INPUTS:
            raise InvalidInput(f"{where}: {quote_short(module)}.qweight is {entry.dtype} {list(entry.shape)}, not I32")
        inputs, outputs = entry.shape[0] * each, entry.shape[1]
        if scheme.layout == "awq":
            inputs, outputs = entry.shape[0], entry.shape[1] * each
        groups = inputs // (stored.group or max(1, inputs))
        parts = {"weight": "qweight", "scales": "scales", "zeros": "qzeros", "order": "g_idx"}
        parts = {field: f"{module}.{part}" for field, part in parts.items()}
        _expect(where, folder, parts["scales"], get_args(ScaleType), (groups, outputs))
        _expect(where, folder, parts["zeros"], ("I32",), (groups, math.ceil(outputs / each)))
        if parts["order"] in folder.entries:
            _expect(where, folder, parts["order"], ("I32", "I64"), (inputs,))
        matrix = _matrix(where, folder, module, (outputs, inputs), stored, parts)
        if matrix.order is not None:
            _refuse_order(where, folder, matrix.order, matrix.group)
        yield matrix


def _columns_of_words(folder: TensorFolder, matrix: _Matrix, rows: slice) -> NDArray[np.uint8]:
    packed = np.ascontiguousarray(folder.array(matrix.weight)[:, rows].T).view(np.uint8)
    return unpack_unsigned(packed, matrix.bits, matrix.inputs)


def _refuse_order(where: Path, folder: TensorFolder, name: str, group: int) -> None:
    """Refuse columns that are not stored in the order of their groups."""
    order = folder.array(name)
    if not np.array_equal(order, np.arange(len(order)) // group):
        raise Unsupported(
            f"{where}: {quote_short(name)}: columns are stored in order of activation, which is not "
            "read; give the float model, or one quantised with desc_act false"
        )


def _scales_down(folder: TensorFolder, matrix: _Matrix, rows: slice) -> NDArray[np.float32]:
    return np.ascontiguousarray(folder.floats(matrix.scales)[:, rows].T)


def _zeros_along(folder: TensorFolder, matrix: _Matrix, rows: slice) -> NDArray[np.int16]:
    words, places = _words_of_outputs(matrix, rows)
    packed = np.ascontiguousarray(folder.array(str(matrix.zeros))[:, words]).view(np.uint8)
    return unpack_unsigned(packed, matrix.bits, places.stop).T[places].astype(np.int16)


# --- AWQ: rows of words along the output, eight outputs in each in an order of their own, otherwise as GPTQ

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of each output in its word


def _unsigned_awq(folder: TensorFolder, matrix: _Matrix, rows: slice) -> NDArray[np.uint8]:
    return np.ascontiguousarray(_in_order(folder, matrix.weight, matrix, rows))


def _zeros_awq(folder: TensorFolder, matrix: _Matrix, rows: slice) -> NDArray[np.int16]:
    return _in_order(folder, str(matrix.zeros), matrix, rows).astype(np.int16)


def _in_order(folder: TensorFolder, name: str, matrix: _Matrix, rows: slice) -> NDArray[np.uint8]:
    """Unpack words [n, outputs / 8] to the values of some outputs [rows, n]."""
    words, places = _words_of_outputs(matrix, rows)
    packed = np.ascontiguousarray(folder.array(name)[:, words])
    values = unpack_unsigned(packed.view(np.uint8), 4, packed.shape[1] * 8)
    return values.reshape(len(packed), -1, 8)[:, :, _AWQ_PLACES].reshape(len(packed), -1).T[places]


# --- MLX affine: scale × unsigned integer + bias


def _find_mlx(where: Path, folder: TensorFolder, scheme: QuantScheme) -> Iterator[_Matrix]:
    for module in _modules(folder, ".scales"):
        stored = scheme.modules.get(module, scheme.groups[0])
        parts = {field: f"{module}.{part}" for field, part in _MLX_PARTS.items()}
        weight, scales = folder.entry(parts["weight"]), folder.entry(parts["scales"])
        if stored is None or weight.dtype != "U32" or len(weight.shape) != 2:
            raise InvalidInput(
                f"{where}: tensor {quote_short(parts['weight'])} is {weight.dtype} {list(weight.shape)} with scales; "
                "config.json and file disagree"
            )
        inputs = weight.shape[1] * 32 // stored.bits
        shape = (weight.shape[0], inputs // (stored.group or inputs or 1))
        _expect(where, folder, parts["scales"], get_args(ScaleType), shape)
        _expect(where, folder, parts["zeros"], (scales.dtype,), shape)
        yield _matrix(where, folder, module, (weight.shape[0], inputs), stored, parts)


_MLX_PARTS = {"weight": "weight", "scales": "scales", "zeros": "biases"}


class _Layout(NamedTuple):
    """How a layout finds its matrices, and reads some rows: packed integers [rows, in], scales and zero points.

    The last two are [rows, groups]; without zero points, what a group adds is stored instead.
    """

    find: Callable[[Path, TensorFolder, QuantScheme], Iterator[_Matrix]]
    unsigned: Callable[[TensorFolder, _Matrix, slice], NDArray[np.uint8]]
    scales: Callable[[TensorFolder, _Matrix, slice], NDArray[np.float32]]
    zeros: Callable[[TensorFolder, _Matrix, slice], NDArray[np.int16]] | None


_LAYOUTS: dict[QuantLayout, _Layout] = {
    "compressed-tensors": _Layout(_find_compressed, _rows_of_words, _scales_of_rows, _zeros_down),
    "gptq": _Layout(_find_gptq, _columns_of_words, _scales_down, _zeros_along),
    "awq": _Layout(_find_gptq, _unsigned_awq, _scales_down, _zeros_awq),
    "mlx": _Layout(_find_mlx, _rows_of_words, _scales_of_rows, None),
}
