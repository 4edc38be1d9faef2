"""Matrices of experts that a file holds in stacks (gpt-oss), read by expert under names of their own.

Floats are stored as [experts, inputs, outputs], MXFP4 as [experts, outputs, inputs / 32, 16] bytes of two values each,
with an exponent for every 32. Outputs of an expert's gate and up projection alternate.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edgekit.errors import InvalidInput, quote_short
from edgekit.formats.int_packing import DerivedEntry, bf16_to_float32
from edgekit.formats.quantised import DerivedTensors
from edgekit.formats.safetensors import TensorFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from edgekit.formats.int_packing import IntegerFormat

_STACK = re.compile(r"(.+\.experts\.)(gate_up|down)_proj(_bias|_blocks)?")
_PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
_MOST_EXPERTS = 1 << 10
_FLOATS = ("BF16", "F16", "F32")
_GROUP, _GROUP_BYTES = 32, 16  # values that share an exponent, and their bytes
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = np.concatenate([_FP4, -_FP4])  # by code: the fourth bit is the sign
_BIAS, _NAN = 127, 255  # of exponents


class _Place(NamedTuple):
    """The part of a stack that is one expert's tensor: every `step`-th output from `first` on."""

    stack: str
    expert: int
    first: int
    step: int


class ExpertStacks(DerivedTensors):
    """The tensors of a folder, with each expert's matrices and biases in place of the stacks.

    Has the methods of `TensorFolder` that quantisers and references use; `floats` dequantises MXFP4.
    """

    integer_formats: Mapping[str, IntegerFormat] = {}  # by tensor; none of them is integers with scales

    def __init__(self, folder: TensorFolder) -> None:
        super().__init__(folder)
        self._places: dict[str, _Place] = {}
        for stack in folder.entries:
            if match := _STACK.fullmatch(stack):
                self._split(stack, match[1], _PARTS[match[2]], match[3] or "")

    @staticmethod
    def within(folder: TensorFolder) -> TensorFolder | ExpertStacks:
        """Return the folder as it is, or, if it holds stacks, the experts in them."""
        return ExpertStacks(folder) if any(map(_STACK.fullmatch, folder.entries)) else folder

    def floats(self, name: str, rows: slice | None = None) -> NDArray[np.float32]:
        """Return a tensor, or some of its rows, as float32."""
        place = self._places.get(name)
        if place is None:
            return self._folder.floats(name, rows)
        rows = slice(None) if rows is None else rows
        outputs = slice(place.first, None, place.step)
        stored = self._folder.array(place.stack)[place.expert]
        if place.stack.endswith("_blocks"):
            exponents = self._folder.array(_scales(place.stack))[place.expert][outputs][rows]
            if (exponents == _NAN).any():
                raise InvalidInput(f"{self._where}: {quote_short(name)}: holds an exponent that is no number")
            return _dequantised(stored[outputs][rows], exponents)
        values = np.ascontiguousarray(stored.T[outputs][rows])  # a bias has one dimension
        is_bf16 = self._folder.entry(place.stack).dtype == "BF16"
        return bf16_to_float32(values) if is_bf16 else values.astype(np.float32)

    def release(self, name: str) -> None:
        """Return the mapped pages of a tensor, or of its stack, to the system; the next access reads them again."""
        place = self._places.get(name)
        if place is None:
            self._folder.release(name)
            return
        for stack in (place.stack, _scales(place.stack)) if place.stack.endswith("_blocks") else (place.stack,):
            self._folder.release(stack)

    def _split(self, stack: str, parent: str, parts: tuple[str, ...], suffix: str) -> None:
        count, shape, dtype, size = self._checked(stack, suffix)
        if shape[0] % len(parts):
            raise InvalidInput(f"{self._where}: tensor {quote_short(stack)} has {shape[0]} outputs of gate and up")
        mine = (shape[0] // len(parts), *shape[1:])
        kind = "bias" if suffix == "_bias" else "weight"
        for name in _stored(stack, suffix):
            del self.entries[name]
        for expert in range(count):
            for first, part in enumerate(parts):
                name = f"{parent}{expert}.{part}.{kind}"
                if name in self.entries:
                    raise InvalidInput(f"{self._where}: tensor {quote_short(name)} is stored twice; correct the file")
                self._places[name] = _Place(stack, expert, first, len(parts))
                self.entries[name] = DerivedEntry(dtype, mine, size // count // len(parts))

    def _checked(self, stack: str, suffix: str) -> tuple[int, tuple[int, ...], str, int]:
        """Return a stack's number of experts, the shape [outputs, inputs] of one, its type, and its bytes."""
        entry = self._folder.entry(stack)
        described = f"{self._where}: tensor {quote_short(stack)} is {entry.dtype} {quote_short(list(entry.shape))}"
        if not 1 <= next(iter(entry.shape), 0) <= _MOST_EXPERTS:
            raise InvalidInput(f"{described}, which holds no experts, or more than {_MOST_EXPERTS}; correct the file")
        count, *rest = entry.shape
        if suffix == "_blocks":
            scales = self._folder.entry(_scales(stack))
            if entry.dtype != "U8" or len(rest) != 3 or rest[2] != _GROUP_BYTES:
                raise InvalidInput(f"{described}, not MXFP4 blocks of {_GROUP_BYTES} bytes; correct the file")
            if scales.dtype != "U8" or scales.shape != entry.shape[:3]:
                raise InvalidInput(f"{described}, with exponents {quote_short(list(scales.shape))}; correct the file")
            return count, (rest[0], rest[1] * _GROUP), "MXFP4", entry.bytes + scales.bytes
        if entry.dtype not in _FLOATS or len(rest) != (1 if suffix == "_bias" else 2):
            raise InvalidInput(f"{described}, not a stack of floats ({', '.join(_FLOATS)}); correct the file")
        return count, tuple(reversed(rest)), entry.dtype, entry.bytes


def _scales(stack: str) -> str:
    return f"{stack.removesuffix('_blocks')}_scales"


def _stored(stack: str, suffix: str) -> Iterator[str]:
    yield stack
    if suffix == "_blocks":
        yield _scales(stack)


def _dequantised(blocks: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return rows of MXFP4 [rows, groups, 16] with exponents [rows, groups] as floats; low nibbles come first."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*exponents.shape, _GROUP)
    values: NDArray[np.float32] = np.ldexp(_VALUES[codes], exponents.astype(np.int32)[..., None] - _BIAS)
    return values.reshape(len(blocks), -1)
