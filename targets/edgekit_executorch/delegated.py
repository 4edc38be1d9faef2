"""Reads XNNPACK's graph of one delegated part: the stored tensors of its products.

The graph is a flatbuffer, read by the field numbers of the vendor's schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from edgekit.errors import Unsupported
from edgekit_executorch.flatbuffer import Flat
from edgekit_executorch.stored import ByteRange, Constant, Linear, StoredKind, constant_at

_NODES, _VALUES, _DATA = 1, 2, 8
_IS_PLAIN, _IS_QUANTISED = 1, 2
_BY_ROW, _BY_GROUP = 1, 4
_DATATYPES: dict[int, StoredKind] = {1: "float32", 6: "int8", 10: "int4"}
_IS_LINEAR, _IS_PRODUCT = 2, 15


class DelegatedPart:
    """A delegated part. `given`: its arguments; None for an argument that is computed."""

    def __init__(self, flat: Flat, named: Mapping[str, ByteRange], given: Sequence[Constant | None]) -> None:
        self._flat, self._named, self._given = flat, named, given
        graph = self._graph = flat.root()
        self._data = list(flat.tables(graph, _DATA))
        self._values: dict[int, tuple[int, int]] = {}  # id → the tensor, and its quantisation or 0
        for entry in flat.tables(graph, _VALUES):
            kind, value = flat.union(entry, 0) or (0, 0)
            tensor = flat.table(value, 0) if kind == _IS_QUANTISED else value
            if kind in (_IS_PLAIN, _IS_QUANTISED) and tensor is not None:
                self._values[flat.number(tensor, 6)] = (tensor, value if kind == _IS_QUANTISED else 0)

    def linears(self) -> Iterator[tuple[int, Linear]]:
        """Yield products with a stored matrix, each with its index in the traced method."""
        for index, node in self._nodes(_IS_LINEAR):
            weight = self._constant(node, 1)
            if weight is not None:
                yield index, Linear(weight, self._constant(node, 2))

    def factors(self) -> Iterator[tuple[int, Constant]]:
        """Yield the stored factors of elementwise products, each with its index in the traced method."""
        for index, node in self._nodes(_IS_PRODUCT):
            for factor in (self._constant(node, field) for field in (0, 1)):
                if factor is not None and prod(factor.shape) > 1:
                    yield index, factor

    def _nodes(self, kind_of_node: int) -> Iterator[tuple[int, int]]:
        for entry in self._flat.tables(self._graph, _NODES):
            kind, node = self._flat.union(entry, 0) or (0, 0)
            if kind == kind_of_node:
                yield self._flat.number(entry, 2), node

    def _constant(self, node: int, field: int) -> Constant | None:
        """Return the constant in a node's field, stored or given as an argument; None if the value is computed."""
        tensor, quantised = self._values.get(self._flat.number(node, field), (0, 0))
        if not tensor:
            return None
        flat, buffer, outside = self._flat, self._flat.number(tensor, 3), self._flat.number(tensor, 4)
        if not buffer:
            return self._given[outside] if outside < len(self._given) else None
        kind = _DATATYPES.get(flat.number(tensor, 0, "h"))
        if kind is None:
            raise Unsupported("executorch: a part of XNNPACK has a number type that edgekit never writes; export again")
        constant = constant_at(flat.numbers(tensor, 2, "I"), kind, self._place(buffer))
        if kind == "float32":
            return constant
        how, scales = flat.union(quantised, 1) or (0, 0)
        if how == _BY_ROW and kind == "int8":
            return constant._replace(scales=self._place(flat.number(scales, 2)))
        if how == _BY_GROUP and kind == "int4":
            return constant._replace(scales=self._place(flat.number(scales, 4)), group=flat.number(scales, 2, "i"))
        raise ValueError("integers without scales")

    def _place(self, buffer: int) -> ByteRange:
        """Return the byte range of a buffer; the part refers to the buffer by its name."""
        entry = self._data[buffer]
        place, size = self._named.get(self._flat.text(entry, 2)), self._flat.number(entry, 1, "Q")
        if place is None or size > place.size:
            raise ValueError("a part's constant is missing")
        return ByteRange(place.start, size)
