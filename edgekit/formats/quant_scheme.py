"""The quantisation that a model's config states, as readers of its tensors need it. Pure data, without numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

QuantLayout = Literal["compressed-tensors", "gptq", "mlx"]


class StoredGroups(NamedTuple):
    """Bits of an integer, and the values of a row that share a scale; None: all of them."""

    bits: int
    group: int | None


class QuantScheme(NamedTuple):
    """The layout of quantised matrices, with their bits and groups, the usual ones first.

    `modules` are MLX's exceptions by name; None: floats. `zero` is the zero point that GPTQ stores, one less in its
    first version.
    """

    layout: QuantLayout
    groups: tuple[StoredGroups, ...]
    modules: Mapping[str, StoredGroups | None] = {}
    zero: int = 0

    @property
    def name(self) -> str:
        """The name of the layout as people write it: W4A16 is compressed-tensors' four bits."""
        bits = self.groups[0].bits
        return f"W{bits}A16" if self.layout == "compressed-tensors" else f"{self.layout.upper()} {bits}-bit"
