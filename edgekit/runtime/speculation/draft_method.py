"""What a draft method is made of: the source that opens it, the method, and its proposer for each request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from edgekit.artifact.artifact import Artifact
    from edgekit.contracts.engine import Engine, State
    from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
    from edgekit.contracts.plan import Plan
    from edgekit.runtime.generation.sampling import Sampler
    from edgekit.runtime.generation.structured import Grammar
    from edgekit.runtime.generation.tokenizer import Codec
    from edgekit.runtime.speculation.costs import Costs
    from edgekit.runtime.speculation.hidden_log import HiddenLog


class DraftRequest(NamedTuple):
    """The parts of a request that its drafter reads. The drafter must not change them."""

    prompt: Sequence[int]
    sampler: Sampler  # fork it to draft with the request's noise and penalties
    policy: KVEvictionPolicy
    max_length: int  # of prompt and answer together, in tokens
    state: Callable[[], State | None]  # returns the target's state; None unless the request is running
    grammar: Grammar | None = None
    eos: frozenset[int] = frozenset()
    hidden: HiddenLog | None = None  # the target's hidden states; a drafter that reads them sets `most_tokens`


class Proposer(Protocol):
    """A drafter of a `DraftMethod`."""

    @property
    def match_length(self) -> int:
        """The length of the match behind the last proposal. Acceptance is counted separately for each length."""

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]: ...
    def observe(self, accepted: Sequence[int]) -> None: ...
    def close(self) -> None: ...

    def catch_up_s(self, history: Sequence[int]) -> float:
        """Seconds to process the text that the drafter has not processed yet, without the newest token."""
        return 0.0


class DraftMethod(Protocol):
    """A way to propose tokens (prompt lookup, a draft model, …), for all requests of a runtime."""

    @property
    def name(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Bytes of memory in addition to the target's."""

    @property
    def reads_hidden(self) -> bool:
        """True if its drafters read the target's hidden states."""

    def start(self, request: DraftRequest) -> Proposer: ...
    def draft_s(self, tokens: int) -> float:
        """Seconds to draft `tokens` tokens, as calibrated."""

    def close(self) -> None: ...


class DraftTarget(NamedTuple):
    """The open model that a method drafts for."""

    engine: Engine
    artifact: Artifact
    codec: Codec
    costs: Costs  # of its calls
    policy: KVEvictionPolicy
    kv_config: KVCacheConfig


class DraftSource(ABC):
    """Opens one kind of draft method. The option is its name, or `NAME:ARGUMENT`."""

    def check(self, argument: str) -> None:  # noqa: B027 - optional, like all but `open`
        """Refuse a wrong argument before anything is loaded. Raises `InvalidInput`."""

    def suits(self, plan: Plan) -> bool:
        """Return whether `draft="auto"` uses this source with the artifact of `plan`."""
        return False

    def reads_hidden(self, plan: Plan) -> bool:
        """Return whether its methods read the target's hidden states, which take memory."""
        return False

    def private_bytes(self, argument: str, plan: Plan, tokens: int, sequences: int) -> int:
        """Predict the private memory of drafting for `sequences` texts of `tokens` tokens."""
        return 0

    @abstractmethod
    def open(self, argument: str, target: DraftTarget) -> DraftMethod:
        """Open the method, which the runtime closes. Raises `Unsupported` if this artifact does not have it."""
