"""A draft model: a smaller artifact with the same vocabulary, on any target, that writes the next tokens first.

Its state follows the target's history: what was guessed wrong is rewound, what it missed is read, and it evicts where
its target's policy does. It knows nothing of the target but the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgekit.cache import Storage
from edgekit.errors import Unsupported
from edgekit.interfaces import Chunk
from edgekit.runtime.drafting.guessing import guess

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from edgekit.cache import CachePolicy
    from edgekit.interfaces import Engine, State
    from edgekit.runtime.drafting.costs import Costs
    from edgekit.runtime.drafting.request import Request


class DraftModel:
    """One open draft model, for all requests of a runtime."""

    name = "model"

    def __init__(
        self,
        engine: Engine,
        storage: Storage,
        costs: Costs,
        *,
        vocabulary: int,
        chunk_tokens: int,
        tokens: int = 8,
        bytes: int = 0,  # noqa: A002 - as every part of a runtime calls what it takes
        path: Path | None = None,
    ) -> None:
        self.engine, self.storage, self.costs, self.vocabulary, self.bytes, self.path = (
            engine, storage, costs, vocabulary, bytes, path,
        )  # fmt: skip
        able = engine.abilities
        self.tokens = tokens if able.max_rewind is None else min(tokens, able.max_rewind)
        self.chunk_tokens = min(chunk_tokens, able.max_chunk_tokens)
        self._read_s = costs.of(costs.most) / costs.most
        self.states = 0

    def start(self, request: Request) -> ModelDrafter:
        return ModelDrafter(self, request)

    def draft_s(self, tokens: int) -> float:
        # A guess that was accepted is read together with the token after it.
        return self.costs.one * (tokens - 1) + self.costs.of(min(2, self.costs.most))

    def read_s(self, tokens: int) -> float:
        """Seconds to read so many tokens."""
        return self._read_s * tokens

    def free_state(self) -> State | None:
        """A state, or None while all are in use."""
        if self.states >= self.engine.abilities.max_states:
            return None
        state = self.engine.start(self.storage)
        self.states += 1
        return state

    def close(self) -> None:
        self.engine.close()


class ModelDrafter:
    """Drafts for one request."""

    grade = 0

    def __init__(self, model: DraftModel, request: Request) -> None:
        self._model, self._request = model, request
        self._state: State | None = None
        self._guesses: list[int] = []  # fed after `_known`, and not confirmed yet
        self._known = 0  # tokens of the history that were fed

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        if self._state is None:
            self._state = self._model.free_state()
            if self._state is None:
                return ()
        state, limit = self._state, min(limit, self._model.tokens)
        try:
            self._forget(state, history)
            row = self._read(state, history)
            return guess(
                self._request, self._model.vocabulary, len(history), limit, row, lambda token: self._feed(state, token)
            )
        except BaseException:
            self.close()  # the engine has closed the state, or nobody knows what it holds
            raise

    def waiting_s(self, history: Sequence[int]) -> float:
        missed = len(history) - self._known - len(self._guesses) - 2
        return self._model.read_s(missed) if missed > 0 else 0.0

    def observe(self, accepted: Sequence[int]) -> None:
        """The history says all."""

    def close(self) -> None:
        state, self._state = self._state, None
        if state is not None:
            self._model.states -= 1
            state.close()

    def _forget(self, state: State, history: Sequence[int]) -> None:
        """Keep the guesses that came true, rewind the others; the newest token is always read afresh, for its row."""
        right = 0
        newest = len(history) - 1
        while right < len(self._guesses) and self._known + right < newest:
            if self._guesses[right] != history[self._known + right]:
                break
            right += 1
        if right < len(self._guesses):
            state.rewind(len(self._guesses) - right)
        self._known += right
        self._guesses = []

    def _read(self, state: State, history: Sequence[int]) -> NDArray[np.float32]:
        """Feed what the target has chosen meanwhile, evicting where the policy says; the row after the newest token."""
        policy: CachePolicy = self._request.policy
        logits = None
        while self._known < len(history):
            eviction = policy.eviction(state.length)
            if eviction is not None:
                state.evict(*eviction)
            count = min(len(history) - self._known, self._model.chunk_tokens)
            room = policy.room(state.length)
            if room is not None:
                count = min(count, room)
            is_last = self._known + count == len(history)
            chunk = Chunk(state, history[self._known : self._known + count], int(is_last))
            logits = self._model.engine.forward([chunk])[0]
            self._known += count
        assert logits is not None
        row: NDArray[np.float32] = logits[-1]
        return row

    def _feed(self, state: State, token: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self._model.engine.forward([Chunk(state, [token], 1)])[0][0]
        self._guesses.append(token)
        return row


def check_draft(engine: Engine, storage: Storage, policy: CachePolicy, where: str) -> Storage:
    """How the draft's states are held to follow the target's; refused where they cannot be."""
    able = engine.abilities
    if policy.window is not None and not able.can_evict:
        raise Unsupported(
            f"draft {where}: its engine cannot evict tokens, and the target keeps a window; draft without"
        )
    if able.max_rewind is not None and able.max_rewind < 1:
        raise Unsupported(f"draft {where}: its engine cannot take tokens back; use another draft")
    bits = storage.kv_bits if storage.kv_bits in able.kv_bits else able.kv_bits[0]
    return Storage(capacity_tokens=storage.capacity_tokens, kv_bits=bits)
