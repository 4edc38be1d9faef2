"""What a program's file stores: a tensor by its shape, the kind of its numbers, and where their bytes are."""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

Kind = Literal["float32", "int8", "int4"]
BITS = {"float32": 32, "int8": 8, "int4": 4}


class Place(NamedTuple):
    """Bytes of the file."""

    start: int
    size: int


class Constant(NamedTuple):
    """A tensor of the file: where its values and their scales are; `group` values share one, or a whole row does."""

    shape: tuple[int, ...]
    kind: Kind
    values: Place
    scales: Place | None = None
    group: int | None = None


class Linear(NamedTuple):
    """A product with a stored matrix."""

    weight: Constant
    bias: Constant | None


def constant_at(shape: tuple[int, ...], kind: Kind, place: Place) -> Constant:
    """A tensor at the beginning of `place`."""
    rows, inputs = prod(shape[:-1]), shape[-1] if shape else 1
    size = rows * -(-inputs * BITS[kind] // 8)
    if min(shape, default=1) < 0 or size > place.size:
        raise ValueError("a constant with too few bytes")
    return Constant(shape, kind, Place(place.start, size))
