"""Self-speculation: the target's first layers and its head draft tokens, on the target's own state.

Drafted tokens are rewound before they are verified; an engine may cache the first layers' results and reuse them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from edgekit.contracts.engine import Chunk
from edgekit.drafters import CostProbe, DraftSource, Proposer, draft, known_share
from edgekit.errors import InvalidInput, Unsupported, quote_short

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.engine import Engine, State
    from edgekit.contracts.plan import Plan
    from edgekit.drafters import DraftRequest, DraftTarget


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


class ExitDrafter(Proposer):
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
        vocabulary = self._exit.engine.capabilities.vocabulary
        tokens = draft(self._request, vocabulary, len(history), limit, logits, lambda token: self._feed(state, token))
        state.rewind(state.length - before)
        return tokens

    def observe(self, accepted: Sequence[int]) -> None:
        """Nothing to learn: the state is the target's."""

    def close(self) -> None:
        """Nothing to release: the state is the target's."""

    def _feed(self, state: State, token: int) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._exit.engine.forward([Chunk(state, [token], 1, self._exit.layer)])[0][0]
        return logits


class EarlyExitSource(DraftSource):
    """An exit of the artifact; `early-exit:LAYER` chooses it."""

    def suits(self, plan: Plan) -> bool:
        return bool(plan.exits)

    def open(self, argument: str, target: DraftTarget) -> EarlyExit:
        engine, artifact = target.engine, target.artifact
        layer = _exit(argument, engine.capabilities.exits, len(artifact.plan.model.layers))
        with closing(CostProbe(engine, target.kv_config)) as probe:
            share = known_share(f"exit-{layer}-cost", artifact.sha256, probe, probe.at_exit(layer))
        return EarlyExit(engine, layer, share * target.costs.one)


def _exit(argument: str, exits: tuple[int, ...], layers: int) -> int:
    """Return the exit of the option; without one, the exit nearest to a third of the layers."""
    if not exits:
        raise Unsupported("draft early-exit: this artifact has no exits; export it with `--exit LAYER`")
    if not argument:
        return min(exits, key=lambda layer: (abs(3 * layer - layers), layer))
    if not argument.isdecimal() or int(argument) not in exits:
        raise InvalidInput(
            f"draft early-exit: no exit after layer {quote_short(argument)}; this artifact has "
            f"{', '.join(map(str, exits))}"
        )
    return int(argument)
