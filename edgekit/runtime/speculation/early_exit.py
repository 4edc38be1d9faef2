"""Self-speculation: the target's first layers and its head draft tokens, on the target's own state.

Drafted tokens are rewound before they are verified; an engine may cache the first layers' results and reuse them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgekit.contracts.engine import Chunk
from edgekit.runtime.speculation.drafting import draft

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.engine import Engine, State
    from edgekit.runtime.speculation.drafters import DraftRequest


class EarlyExit:
    """Draft at one exit of the target, for all requests of a runtime."""

    bytes = 0  # uses the target's weights and states
    reads_hidden = False

    def __init__(self, engine: Engine, layer: int, token_s: float, *, tokens: int = 6) -> None:
        self.engine, self.layer, self._token_s = engine, layer, token_s
        self.name = f"early exit after layer {layer}"
        self.tokens = tokens

    def start(self, request: DraftRequest) -> ExitDrafter:
        return ExitDrafter(self, request)

    def draft_s(self, tokens: int) -> float:
        return self._token_s * tokens

    def close(self) -> None:
        """Nothing to release: the engine is the target's."""


class ExitDrafter:
    """Draft for one request, on its own state."""

    match_length = 0

    def __init__(self, exit_: EarlyExit, request: DraftRequest) -> None:
        self._exit, self._request = exit_, request

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        state = self._request.state()
        if state is None or state.position != len(history) - 1:
            return ()
        limit, before = min(limit, self._exit.tokens), state.length
        logits = self._feed(state, history[-1])
        vocabulary = self._exit.engine.abilities.vocabulary
        tokens = draft(self._request, vocabulary, len(history), limit, logits, lambda token: self._feed(state, token))
        state.rewind(state.length - before)
        return tokens

    def catch_up_s(self, history: Sequence[int]) -> float:
        """0: the target has processed the text."""
        return 0.0

    def observe(self, accepted: Sequence[int]) -> None:
        """Nothing to learn: the state is the target's."""

    def close(self) -> None:
        """Nothing to release: the state is the target's."""

    def _feed(self, state: State, token: int) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._exit.engine.forward([Chunk(state, [token], 1, self._exit.layer)])[0][0]
        return logits
