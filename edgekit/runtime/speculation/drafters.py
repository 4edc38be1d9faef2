"""Drafter factories, which make one drafter for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from edgekit.contracts.drafter import Drafter
from edgekit.runtime.speculation.hidden_log import HiddenLog

if TYPE_CHECKING:
    from edgekit.contracts.engine import State
    from edgekit.contracts.kv_policy import KVEvictionPolicy
    from edgekit.runtime.generation.grammar import Grammar
    from edgekit.runtime.generation.sampling import Sampler
    from edgekit.runtime.speculation.controller import SpeculationController


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


class Backoff(tuple[int, ...]):
    """An empty proposal, after which the drafter is not asked for `steps` steps."""

    steps: int

    @staticmethod
    def of(steps: int) -> Backoff:
        backoff = Backoff()
        backoff.steps = steps
        return backoff


class DrafterFactory(Protocol):
    """Makes one drafter for each request. Making one must not use an engine."""

    @property
    def tokens(self) -> int:
        """The most tokens of a proposal."""

    @property
    def controller(self) -> SpeculationController | None:
        """The controller of adaptive drafters; None: always draft, up to `tokens`."""

    def start(self, request: DraftRequest) -> Drafter: ...

    def close(self) -> None: ...


class Drafting(NamedTuple):
    """A drafter factory that calls the function `make` for each prompt."""

    make: Callable[[Sequence[int]], Drafter]
    tokens: int = 4
    controller: SpeculationController | None = None

    def start(self, request: DraftRequest) -> Drafter:
        return self.make(request.prompt)

    def close(self) -> None:
        """Nothing to release."""
