"""The live states of one slab, kept contiguous: a freed row is filled by the last, so that many decode in one call."""

from __future__ import annotations

from edgekit.cache import Storage
from edgekit.rotation import Rotation
from edgekit_onnx.bodies import Running
from edgekit_onnx.slab import KEY, VALUE, Slab
from edgekit_onnx.state import OnnxState


class Rows:
    """Which state lives in which row."""

    def __init__(self, slab: Slab, running: Running, rotation: Rotation, model_key: str, state_bytes: int) -> None:
        self.slab, self.running, self.rotation = slab, running, rotation
        self.model_key, self.state_bytes = model_key, state_bytes
        self.states: list[OnnxState] = []

    def start(self, storage: Storage) -> OnnxState:
        """A state in the next row."""
        assert len(self.states) < self.slab.rows
        state = OnnxState(self, storage, len(self.states))
        self.states.append(state)
        return state

    def free(self, state: OnnxState) -> None:
        """Give the row up; the last state moves into it."""
        last = self.states.pop()
        if last is not state:
            for layer in range(len(self.slab.layers)):
                for kind in (KEY, VALUE):
                    with self.slab.edit(layer, kind, state.row) as place:
                        place[:, : last.length] = self.slab.read(layer, kind, last.row)[:, : last.length]
            self.states[state.row] = last
            last.drafted = None  # what lies behind its end did not move with it
            self.slab.trim(state.row, last.length)
        freed = last.row
        last.row = state.row
        self.slab.trim(freed, 0)
