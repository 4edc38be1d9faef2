"""Self-speculation: the target's own first layers and head guess, all layers then verify, on one state.

What was fed at the exit is rewound before verifying; an engine that keeps those layers' work uses it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgekit.interfaces import Chunk
from edgekit.runtime.drafting.guessing import guess

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.interfaces import Engine, State
    from edgekit.runtime.drafting.request import Request


class EarlyExit:
    """One exit of the target, for all requests of a runtime."""

    bytes = 0  # the target's own weights and states

    def __init__(self, engine: Engine, layer: int, one_s: float, *, tokens: int = 6) -> None:
        self.engine, self.layer, self._one_s = engine, layer, one_s
        self.name = f"early exit after layer {layer}"
        self.tokens = tokens

    def start(self, request: Request) -> ExitDrafter:
        return ExitDrafter(self, request)

    def draft_s(self, tokens: int) -> float:
        return self._one_s * tokens

    def close(self) -> None:
        """The engine is the target's."""


class ExitDrafter:
    """Drafts for one request, on the target's state of it."""

    grade = 0

    def __init__(self, exit_: EarlyExit, request: Request) -> None:
        self._exit, self._request = exit_, request

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        state = self._request.state()
        if state is None or state.position != len(history) - 1:
            return ()
        limit, before = min(limit, self._exit.tokens), state.length
        row = self._feed(state, history[-1])
        vocabulary = self._exit.engine.abilities.vocabulary
        found = guess(self._request, vocabulary, len(history), limit, row, lambda token: self._feed(state, token))
        state.rewind(state.length - before)
        return found

    def waiting_s(self, history: Sequence[int]) -> float:
        """The target has read everything."""
        return 0.0

    def observe(self, accepted: Sequence[int]) -> None:
        """Its layers are the target's: verifying has told them."""

    def close(self) -> None:
        """The state is the target's."""

    def _feed(self, state: State, token: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self._exit.engine.forward([Chunk(state, [token], 1, self._exit.layer)])[0][0]
        return row
