"""The sessions of a body in every form that states ask for: as exported, with a narrow cache, with an adapter.

A form is made from the graphs that were audited, when the first state needs it, and points at the same weights. What
has no state any more can be dropped. Knows nothing of slabs or of what the values mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from edgekit.errors import vendor_errors
from edgekit_onnx.adapters import Adapted, with_inputs
from edgekit_onnx.loading import Graphs
from edgekit_onnx.narrow import BITS, Steps, inputs_of, with_steps
from edgekit_onnx.parts import Part

Sessions = tuple[tuple[Part, Any], ...]


class Form(NamedTuple):
    """How the sessions of a body differ from those that were exported."""

    is_narrow: bool
    sites: frozenset[str]  # products that an adapter changes


class Running(NamedTuple):
    """What runs the states of one storage: the sessions, and what else each part's inputs are bound to."""

    form: Form
    sessions: Sessions
    inputs: tuple[tuple[tuple[str, Any], ...], ...]


class Bodies:
    """Opened when first asked for, and kept until they are dropped."""

    def __init__(self, graphs: Graphs, steps: Steps | None) -> None:
        self._graphs = graphs
        self._steps = {name: graphs.bound(array) for name, array in inputs_of(steps)} if steps else {}
        self._open: dict[Form, Sessions] = {}

    def running(self, kv_bits: int, adapted: Adapted | None) -> Running:
        form = Form(kv_bits == BITS, adapted.sites if adapted else frozenset())
        values = {**(self._steps if form.is_narrow else {}), **(adapted.values if adapted else {})}
        sessions = self.sessions(form)
        inputs = tuple(
            tuple((value.name, values[value.name]) for value in session.get_inputs() if value.name in values)
            for _, session in sessions
        )
        return Running(form, sessions, inputs)

    def sessions(self, form: Form) -> Sessions:
        if form not in self._open:

            def change(data: bytes) -> bytes:
                data = with_inputs(data, form.sites) if form.sites else data
                return with_steps(data) if form.is_narrow else data

            is_changed = form.is_narrow or bool(form.sites)
            with vendor_errors("onnx"):
                self._open[form] = self._graphs.open(change if is_changed else None)
        return self._open[form]

    def drop(self, is_unused: Callable[[Form], bool]) -> None:
        self._open = {form: sessions for form, sessions in self._open.items() if not is_unused(form)}

    def close(self) -> None:
        self._open.clear()
        self._steps.clear()
