"""Drafter factories, which make one drafter for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from edgekit.contracts.drafter import Drafter

if TYPE_CHECKING:
    from edgekit.runtime.speculation.controller import SpeculationController
    from edgekit.runtime.speculation.draft_method import DraftRequest


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
