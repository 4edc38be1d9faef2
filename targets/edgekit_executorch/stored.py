"""Constants in a program's file: a tensor's shape, the type of its numbers, and their byte range."""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

StoredKind = Literal["float32", "int8", "int4"]
BITS = {"float32": 32, "int8": 8, "int4": 4}


class ByteRange(NamedTuple):
    """A range of bytes in the file."""

    start: int
    size: int


class Constant(NamedTuple):
    """A stored tensor. `group` values share a scale, or a whole row if `group` is None; floats have no scales."""

    shape: tuple[int, ...]
    kind: StoredKind
    values: ByteRange
    scales: ByteRange | None = None
    group: int | None = None


class Linear(NamedTuple):
    """A stored matrix that is multiplied with, and its bias."""

    weight: Constant
    bias: Constant | None


def constant_at(shape: tuple[int, ...], kind: StoredKind, place: ByteRange) -> Constant:
    """Return the tensor at the beginning of `place`. Raises ValueError if `place` is too small."""
    rows, inputs = prod(shape[:-1]), shape[-1] if shape else 1
    size = rows * -(-inputs * BITS[kind] // 8)
    if min(shape, default=1) < 0 or size > place.size:
        raise ValueError("a constant with too few bytes")
    return Constant(shape, kind, ByteRange(place.start, size))
