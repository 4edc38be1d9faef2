"""How a runtime comes by its drafters: one for each request. The drafters themselves promise only the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from edgekit.interfaces import Drafter

if TYPE_CHECKING:
    from edgekit.cache import CachePolicy
    from edgekit.interfaces import State
    from edgekit.runtime.drafting.adapting import Kind
    from edgekit.runtime.drafting.pace import Pace
    from edgekit.runtime.sampling import Sampler
    from edgekit.runtime.sequence import Grammar


class Request(NamedTuple):
    """What a drafter may know of the request that it drafts for. It reads all of this and changes none of it."""

    prompt: Sequence[int]
    sampler: Sampler  # fork it to draft with the same noise and penalties
    policy: CachePolicy
    last: int  # tokens that prompt and answer can have together
    state: Callable[[], State | None]  # the target's; None before the request runs and after it has ended
    grammar: Grammar | None = None
    eos: frozenset[int] = frozenset()


class Rest(tuple[int, ...]):
    """No proposal, and none in so many steps after this one either: until then nobody need ask."""

    steps: int

    @staticmethod
    def of(steps: int) -> Rest:
        found = Rest()
        found.steps = steps
        return found


class Source(Protocol):
    """Where drafters come from: one for each request, made without touching an engine."""

    @property
    def tokens(self) -> int:
        """At most so many are proposed in a step."""

    @property
    def pace(self) -> Pace | None:
        """What decides when to draft and how far; None: always, and as far as `tokens`."""

    def start(self, request: Request) -> Drafter: ...

    def close(self) -> None: ...


class Drafting(NamedTuple):
    """`make` gives the drafter of a request, from its prompt; at most `tokens` are proposed in a step."""

    make: Callable[[Sequence[int]], Drafter]
    tokens: int = 4
    pace: Pace | None = None

    def start(self, request: Request) -> Drafter:
        return self.make(request.prompt)

    def close(self) -> None:
        """Nothing is held."""


class Unpaced(NamedTuple):
    """A kind of proposer that always drafts as far as it may, whether that pays or not: for measurements."""

    kind: Kind
    most: int | None = None
    pace: Pace | None = None

    @property
    def tokens(self) -> int:
        return self.most or self.kind.tokens

    def start(self, request: Request) -> Drafter:
        return self.kind.start(request)

    def close(self) -> None:
        self.kind.close()


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
