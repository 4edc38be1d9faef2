"""The variants of a body's sessions that states need: as exported, with an 8-bit cache, with an adapter.

A variant is derived from the audited graphs when the first state needs it, and points at the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from edgekit.errors import vendor_errors
from edgekit_onnx.adapters import OnnxAdapter, with_inputs
from edgekit_onnx.int8_kv import BITS, Steps, inputs_of, with_steps
from edgekit_onnx.layout import GraphPart
from edgekit_onnx.loading import Graphs

Sessions = tuple[tuple[GraphPart, Any], ...]


class Variant(NamedTuple):
    """Differences of sessions from the exported graphs."""

    is_int8: bool  # the cache is held in 8 bits
    sites: frozenset[str]  # products that an adapter changes


class Running(NamedTuple):
    """The sessions that run a state, and for each part the inputs that stay bound to the same values."""

    variant: Variant
    sessions: Sessions
    inputs: tuple[tuple[tuple[str, Any], ...], ...]


class SessionVariants:
    """Opens each variant when it is first needed, and keeps it until it is dropped."""

    def __init__(self, graphs: Graphs, steps: Steps | None) -> None:
        self._graphs = graphs
        self._steps = {name: graphs.bound(array) for name, array in inputs_of(steps)} if steps else {}
        self._open: dict[Variant, Sessions] = {}

    def running(self, kv_bits: int, adapter: OnnxAdapter | None) -> Running:
        """The sessions and bound inputs for a cache width and an adapter."""
        variant = Variant(kv_bits == BITS, adapter.sites if adapter else frozenset())
        values = {**(self._steps if variant.is_int8 else {}), **(adapter.values if adapter else {})}
        sessions = self.sessions(variant)
        inputs = tuple(
            tuple((value.name, values[value.name]) for value in session.get_inputs() if value.name in values)
            for _, session in sessions
        )
        return Running(variant, sessions, inputs)

    def sessions(self, variant: Variant) -> Sessions:
        if variant not in self._open:

            def change(data: bytes) -> bytes:
                data = with_inputs(data, variant.sites) if variant.sites else data
                return with_steps(data) if variant.is_int8 else data

            is_changed = variant.is_int8 or bool(variant.sites)
            with vendor_errors("onnx"):
                self._open[variant] = self._graphs.open(change if is_changed else None)
        return self._open[variant]

    def drop(self, is_unused: Callable[[Variant], bool]) -> None:
        self._open = {variant: sessions for variant, sessions in self._open.items() if not is_unused(variant)}

    def close(self) -> None:
        self._open.clear()
        self._steps.clear()
