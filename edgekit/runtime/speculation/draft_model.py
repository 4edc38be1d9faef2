"""A draft model: a smaller artifact with the same vocabulary, on any target, that drafts the next tokens.

The draft's state follows the target's text: wrong drafts are rewound, missing tokens are fed, and tokens are evicted
where the target evicts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import NEWEST, KVCacheConfig
from edgekit.errors import Unsupported
from edgekit.runtime.speculation.drafting import draft

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.engine import Engine, State
    from edgekit.contracts.kv_policy import KVEvictionPolicy
    from edgekit.runtime.speculation.costs import Costs
    from edgekit.runtime.speculation.draft_method import DraftRequest


class DraftModel:
    """An open draft model, for all requests of a runtime."""

    name = "model"
    reads_hidden = False

    def __init__(
        self,
        engine: Engine,
        kv_config: KVCacheConfig,
        costs: Costs,
        *,
        vocabulary: int,
        chunk_tokens: int,
        tokens: int = 8,
        bytes: int = 0,  # noqa: A002 - the name in `DraftMethod`
        path: Path | None = None,
    ) -> None:
        self.engine, self.kv_config, self.costs, self.vocabulary = engine, kv_config, costs, vocabulary
        self.bytes, self.path = bytes, path
        capabilities = engine.capabilities
        self.tokens = tokens if capabilities.max_rewind is None else min(tokens, capabilities.max_rewind)
        self.chunk_tokens = min(chunk_tokens, capabilities.max_chunk_tokens)
        self._prefill_token_s = costs.of(costs.most) / costs.most
        self.num_states = 0

    def start(self, request: DraftRequest) -> ModelDrafter:
        return ModelDrafter(self, request)

    def draft_s(self, tokens: int) -> float:
        # The last accepted draft is fed together with the token after it.
        return self.costs.one * (tokens - 1) + self.costs.of(min(2, self.costs.most))

    def prefill_s(self, tokens: int) -> float:
        """Seconds to process `tokens` tokens of a text."""
        return self._prefill_token_s * tokens

    def start_state(self) -> State | None:
        """Return a new state, or None while all are in use."""
        if self.num_states >= self.engine.capabilities.max_states:
            return None
        state = self.engine.start(self.kv_config)
        self.num_states += 1
        return state

    def close(self) -> None:
        self.engine.close()


class ModelDrafter:
    """Draft for one request."""

    match_length = 0

    def __init__(self, model: DraftModel, request: DraftRequest) -> None:
        self._model, self._request = model, request
        self._policy = _policy_of(model, request.policy)
        self._state: State | None = None
        self._num_fed = 0  # tokens of the text in the state
        self._drafted: list[int] = []  # fed after the text, not verified yet

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        if self._state is None:
            self._state = self._model.start_state()
            if self._state is None:
                return ()
        state, limit = self._state, min(limit, self._model.tokens)
        try:
            self._rewind_wrong(state, history)
            logits = self._catch_up(state, history)
            return draft(
                self._request,
                self._model.vocabulary,
                len(history),
                limit,
                logits,
                lambda token: self._feed(state, token),
            )
        except BaseException:
            self.close()  # the engine has closed the state, or its content is unknown
            raise

    def catch_up_s(self, history: Sequence[int]) -> float:
        missing = len(history) - self._num_fed - len(self._drafted) - 2
        return self._model.prefill_s(missing) if missing > 0 else 0.0

    def observe(self, accepted: Sequence[int]) -> None:
        """Nothing to learn: `propose` compares with the text."""

    def close(self) -> None:
        state, self._state = self._state, None
        if state is not None:
            self._model.num_states -= 1
            state.close()

    def _rewind_wrong(self, state: State, history: Sequence[int]) -> None:
        """Keep correct drafts and rewind the others. The newest token is always fed again, for its logits."""
        right = 0
        newest = len(history) - 1
        while right < len(self._drafted) and self._num_fed + right < newest:
            if self._drafted[right] != history[self._num_fed + right]:
                break
            right += 1
        if right < len(self._drafted):
            state.rewind(len(self._drafted) - right)
        self._num_fed += right
        self._drafted = []

    def _catch_up(self, state: State, history: Sequence[int]) -> NDArray[np.float32]:
        """Feed the rest of the text, evicting by the policy; return the logits after the newest token."""
        policy = self._policy
        logits = None
        while self._num_fed < len(history):
            policy.make_room(state, history)
            count = min(len(history) - self._num_fed, self._model.chunk_tokens)
            remaining = policy.remaining_capacity(state.length)
            if remaining is not None:
                count = min(count, remaining)
            is_last = self._num_fed + count == len(history)
            chunk = Chunk(state, history[self._num_fed : self._num_fed + count], int(is_last))
            logits = self._model.engine.forward([chunk])[0]
            self._num_fed += count
        assert logits is not None
        last: NDArray[np.float32] = logits[-1]
        return last

    def _feed(self, state: State, token: int) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._model.engine.forward([Chunk(state, [token], 1)])[0][0]
        self._drafted.append(token)
        return logits


def _policy_of(model: DraftModel, policy: KVEvictionPolicy) -> KVEvictionPolicy:
    """Return the policy for the draft's states: the request's, or a plain window if the draft cannot score tokens."""
    can_score = policy.keep in model.engine.capabilities.scorers and policy.widths((model.kv_config.kv_bits,))
    return policy if can_score else policy.model_copy(update={"keep": NEWEST})


def draft_kv_config(engine: Engine, kv_config: KVCacheConfig, policy: KVEvictionPolicy, where: str) -> KVCacheConfig:
    """Return the cache of the draft's states for the target's `kv_config`. Raises `Unsupported` if it has none."""
    capabilities = engine.capabilities
    if policy.window is not None and not capabilities.can_evict:
        raise Unsupported(
            f"draft {where}: its engine cannot evict tokens, and the target has a window; open without the draft"
        )
    if capabilities.checkpoint_tokens is not None:
        raise Unsupported(
            f"draft {where}: it has a recurrent part, which each wrong draft would rewind by up to "
            f"{capabilities.checkpoint_tokens} tokens; use a draft without recurrent layers"
        )
    if capabilities.max_rewind is not None and capabilities.max_rewind < 1:
        raise Unsupported(f"draft {where}: its engine cannot take tokens back; use another draft")
    bits = kv_config.kv_bits if kv_config.kv_bits in capabilities.kv_bits else capabilities.kv_bits[0]
    return KVCacheConfig(capacity_tokens=kv_config.capacity_tokens, kv_bits=bits)
