"""A way to propose tokens, and its measurements over all requests of a runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from edgekit.runtime.speculation.acceptance import Acceptance

if TYPE_CHECKING:
    from edgekit.runtime.speculation.controller import SpeculationController
    from edgekit.runtime.speculation.drafters import DraftRequest

_NEW_SHARE = 0.1  # weight of a new measurement in a moving mean
_FREE_S = 3e-5  # cheaper methods propose before the length is chosen


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


class DraftStats:
    """The measurements of one draft method, over all requests."""

    def __init__(self, method: DraftMethod, controller: SpeculationController) -> None:
        self.method, self._controller = method, controller
        self.is_free = method.draft_s(1) < _FREE_S
        self.by_match_length: dict[int, Acceptance] = {}
        self.right: list[int] = []  # by position, without decay: for reports
        self.tried: list[int] = []
        self.proposed = self.accepted = 0
        # Measured / calibrated seconds of drafting, corrected for the machine's slowness. The first measurements count
        # more: calibration repeats one call, whose weights stay in the processor's caches, and tries are rare.
        self._correction, self._num_timed = 1.0, 0

    def acceptance(self, match_length: int) -> Acceptance:
        if match_length not in self.by_match_length:
            # The longer the match, the likelier the proposal.
            self.by_match_length[match_length] = Acceptance(guess=(0.65, 0.4, 0.5, 0.65, 0.75)[min(match_length, 4)])
        return self.by_match_length[match_length]

    def draft_s(self, tokens: int) -> float:
        """Seconds to draft `tokens` tokens at the machine's current speed."""
        return self.method.draft_s(tokens) * self._correction * (1.0 if self.is_free else self._controller.slowness)

    def add_time(self, tokens: int, seconds: float) -> None:
        """Learn from the measured time of drafting `tokens` tokens."""
        if tokens and not self.is_free:
            measured = seconds / (self.method.draft_s(tokens) * self._controller.slowness)
            self._num_timed += 1
            share = max(_NEW_SHARE, 1 / (1 + self._num_timed))
            self._correction += share * (min(measured, 3 * self._correction) - self._correction)

    def add_verified(self, right: int, proposed: int) -> None:
        """Count a proposal whose first `right` tokens were accepted."""
        self.proposed += proposed
        self.accepted += right
        for index in range(min(right + 1, proposed)):
            if index == len(self.tried):
                self.right.append(0)
                self.tried.append(0)
            self.right[index] += index < right
            self.tried[index] += 1
