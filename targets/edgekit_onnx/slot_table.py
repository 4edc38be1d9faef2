"""The states of one arena, kept in its first slots, so that they can decode in one call."""

from __future__ import annotations

from typing import Protocol

from edgekit.enginekit.rope_shift import Rotation
from edgekit_onnx.attention_reader import AttentionReader
from edgekit_onnx.int8_kv import Steps
from edgekit_onnx.kv_arena import KEY, VALUE, KVArena
from edgekit_onnx.session_variants import StateSessions


class SlotHolder(Protocol):
    """The parts of a state that its table needs."""

    slot: int

    @property
    def length(self) -> int: ...
    def moved_to(self, slot: int) -> None: ...


class SlotTable:
    """Assigns the slots of one arena to states."""

    def __init__(
        self,
        arena: KVArena,
        running: StateSessions,
        rotation: Rotation,
        attention: AttentionReader | None = None,
        steps: Steps | None = None,
    ) -> None:
        """`steps`: of an 8-bit cache."""
        self.arena, self.running, self.rotation, self.attention = arena, running, rotation, attention
        self.steps = steps
        self.states: list[SlotHolder] = []

    def add(self, state: SlotHolder) -> int:
        """Assign the lowest free slot to `state` and return it."""
        assert len(self.states) < self.arena.slots
        self.states.append(state)
        for values in self.arena.recurrent:
            values[len(self.states) - 1] = 0
        return len(self.states) - 1

    def free(self, state: SlotHolder) -> None:
        """Free a slot and move the last state into it."""
        last = self.states.pop()
        freed = last.slot
        if last is not state:
            for layer in range(len(self.arena.layers)):
                for kind in (KEY, VALUE):
                    with self.arena.edit(layer, kind, state.slot) as cache:
                        cache[:, : last.length] = self.arena.read(layer, kind, freed)[:, : last.length]
            for values in self.arena.recurrent:
                values[state.slot] = values[freed]
            self.states[state.slot] = last
            last.moved_to(state.slot)
            self.arena.trim(last.slot, last.length)
        self.arena.trim(freed, 0)
