"""How a runtime comes by its drafters: one for each request. The drafters themselves promise only the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from edgekit.interfaces import Drafter


class Drafting(NamedTuple):
    """`make` gives the drafter of a request, from its prompt; at most `tokens` are proposed in a step."""

    make: Callable[[Sequence[int]], Drafter]
    tokens: int = 4


class Playback:
    """Proposes what followed when the same text was written before, with every `wrong_every`-th token replaced.

    It shows what verification costs and gains at a known acceptance, without a model.
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
        """Nothing to learn: the text is known."""

    def close(self) -> None:
        """Nothing is held."""
