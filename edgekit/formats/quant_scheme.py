"""The quantisation stated in a model's config, for readers of its tensors. Pure data, without numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

QuantLayout = Literal["compressed-tensors", "gptq", "awq", "mlx", "mxfp4"]


class StoredGroups(NamedTuple):
    """Bits of an integer, and the number of values that share a scale; None: the whole row."""

    bits: int
    group: int | None


class QuantScheme(NamedTuple):
    """The layout of quantised matrices, with their bits and groups, the usual ones first.

    `mxfp4` are the stacks of experts of gpt-oss, whose values are no integers. `modules` are MLX's per-module
    exceptions; None: the module is float. `zero_less` is 1 in the first version of GPTQ, which stores zero points less
    one. `symmetric` is what the config says; zero points and biases in the files are read whatever it says.
    """

    layout: QuantLayout
    groups: tuple[StoredGroups, ...]
    modules: Mapping[str, StoredGroups | None] = {}
    zero_less: int = 0
    symmetric: bool = True

    @property
    def name(self) -> str:
        """The common name of the layout: W4A16 is compressed-tensors with four bits."""
        if self.layout == "mxfp4":
            return "MXFP4"
        bits = self.groups[0].bits
        return f"W{bits}A16" if self.layout == "compressed-tensors" else f"{self.layout.upper()} {bits}-bit"
