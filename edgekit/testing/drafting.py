"""Drafters for tests and measurements: by a function, replayed text, and drafting of a fixed length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from edgekit.contracts.drafter import Drafter
from edgekit.runtime.speculation.draft_method import DraftRequest

if TYPE_CHECKING:
    from edgekit.runtime.speculation.controller import SpeculationController
    from edgekit.runtime.speculation.draft_method import DraftMethod


class Drafting(NamedTuple):
    """A drafter factory that calls the function `make` for each prompt."""

    make: Callable[[Sequence[int]], Drafter]
    tokens: int = 4
    controller: SpeculationController | None = None

    def start(self, request: DraftRequest) -> Drafter:
        return self.make(request.prompt)

    def close(self) -> None:
        """Nothing to release."""


class FixedLengthDrafting(NamedTuple):
    """A draft method that always drafts its full length, for measurements."""

    kind: DraftMethod
    most: int | None = None
    controller: SpeculationController | None = None

    @property
    def tokens(self) -> int:
        return self.most or self.kind.tokens

    def start(self, request: DraftRequest) -> Drafter:
        return self.kind.start(request)

    def close(self) -> None:
        self.kind.close()


class ReplayDrafter:
    """Proposes the continuation of a recorded text, with every `wrong_every`-th token replaced by a wrong one.

    It gives a known acceptance rate without a draft model.
    """

    def __init__(self, text: Sequence[int], *, wrong_every: int = 0, wrong_token: int = 0) -> None:
        self._text, self._every, self._wrong = text, wrong_every, wrong_token

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        following = list(self._text[len(history) : len(history) + limit])
        if self._every:
            places = range(len(history), len(history) + len(following))
            following = [
                self._wrong if place % self._every == 0 else token
                for place, token in zip(places, following, strict=True)
            ]
        return following

    def observe(self, accepted: Sequence[int]) -> None:
        """Do nothing: the text is known."""

    def close(self) -> None:
        """Do nothing: no resources are open."""
