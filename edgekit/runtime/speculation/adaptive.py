"""Adaptive drafting: in each step, ask the draft method with the highest expected speed-up, or none."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from edgekit.runtime.speculation.acceptance import Acceptance
from edgekit.runtime.speculation.controller import FIRST_BACKOFF, DraftLength, SpeculationController, longer_backoff
from edgekit.runtime.speculation.drafters import Backoff

if TYPE_CHECKING:
    from edgekit.runtime.speculation.drafters import DraftRequest

_NEW_SHARE = 0.1  # weight of a new measurement in a moving mean
_FIRST_TOKENS = 3  # longest proposal before the acceptance is known
_CATCH_UP_GAIN = 2.0  # least expected gain, as a multiple of the cost of processing a long prompt with the draft
_LOOKUP_LOSS = 0.0025  # share of a step that unsuccessful look-ups may cost
_TRIES = 4  # proposals in a row after a backoff
_FREE_S = 3e-5  # cheaper methods propose before the length is chosen
_EXPECTED_TOKENS = 256  # most remaining tokens to assume when estimating a gain


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
        self._correction = 1.0  # measured / calibrated seconds of drafting, after correcting for the machine's slowness

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
            self._correction += _NEW_SHARE * (min(measured, 3 * self._correction) - self._correction)

    def add_verified(self, right: int, proposed: int) -> None:
        """Count a proposal whose first `right` tokens were accepted."""
        self.proposed += proposed
        self.accepted += right
        for place in range(min(right + 1, proposed)):
            if place == len(self.tried):
                self.right.append(0)
                self.tried.append(0)
            self.right[place] += place < right
            self.tried[place] += 1


class AdaptingDrafter:
    """Draft as much as pays. If drafting does not pay, back off, then try a few proposals again."""

    def __init__(self, request: DraftRequest, stats: Sequence[DraftStats], controller: SpeculationController) -> None:
        self._request, self._controller = request, controller
        controller.add_request(request.max_length - len(request.prompt))
        self._stats = stats
        self._proposers = [each.method.start(request) for each in stats]
        self._own: dict[tuple[int, int], Acceptance] = {}
        self._backoff_until = 0  # length of the text at the next try
        self._length = 0  # length of the text at the last call
        self._backoff = FIRST_BACKOFF
        self._tries = 0
        self._pending: tuple[DraftStats, Acceptance, Sequence[int]] | None = None
        self._lookup_s = sum(each.method.draft_s(1) for each in stats if each.is_free)

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        self._pending = None
        self._length = len(history)
        if self._length < self._backoff_until:
            return Backoff.of(self._backoff_until - self._length - 1)
        if self._controller.is_due_plain:
            return ()
        trying = self._backoff > FIRST_BACKOFF  # drafting did not pay last time: only try within the loss budget
        best: tuple[DraftLength, int, Sequence[int], Acceptance] | None = None
        offered: list[float] = []
        for place, (stats, proposer) in enumerate(zip(self._stats, self._proposers, strict=True)):
            ready: Sequence[int] = ()
            most = min(limit, stats.method.tokens)
            if stats.is_free:
                ready = proposer.propose(history, most)
                if not ready:
                    continue
                most = len(ready)
            acceptance = self._acceptance(place, proposer.match_length if stats.is_free else 0)
            if acceptance.is_new:
                most = min(most, _FIRST_TOKENS)
            choice = self._controller.choose(acceptance, stats, most, trying=trying)
            offered.append(choice.speed_up)
            if choice.tokens and not ready and not self._is_worth_catching_up(proposer, history, choice, acceptance):
                continue
            if choice.tokens and (best is None or choice.speed_up > best[0].speed_up):
                best = choice, place, ready, acceptance
        if best is None:
            if offered:
                self._controller.promised = max(offered)
                self._back_off_longer()
            else:
                # With a small model the look-up itself takes a measurable share of each step: skip some steps.
                self._back_off(int(self._lookup_s / (_LOOKUP_LOSS * self._controller.plain_step_s())))
            return ()
        choice, place, ready, acceptance = best
        self._controller.promised = choice.speed_up
        pays = self._controller.pays(choice.speed_up)
        if pays:
            self._backoff = FIRST_BACKOFF
        elif self._tries > 1:
            self._tries -= 1
        else:
            self._back_off_longer()
        stats, proposer = self._stats[place], self._proposers[place]
        if ready:
            proposal = ready[: choice.tokens]
        else:
            proposal = self._draft(stats, proposer, history, choice.tokens, pays and not acceptance.is_new)
        self._pending = stats, acceptance, proposal
        return proposal

    def observe(self, accepted: Sequence[int]) -> None:
        if self._pending is None:
            return
        stats, acceptance, proposal = self._pending
        right = 0
        for guess, token in zip(proposal, accepted, strict=False):
            if guess != token:
                break
            right += 1
        acceptance.observe(right, len(proposal))
        stats.add_verified(right, len(proposal))
        if right == len(proposal) and right:
            self._backoff = max(FIRST_BACKOFF, self._backoff // 4)
            self._backoff_until = min(self._backoff_until, self._length + len(accepted) + self._backoff)

    def close(self) -> None:
        for proposer in self._proposers:
            proposer.close()

    def _acceptance(self, place: int, match_length: int) -> Acceptance:
        if (place, match_length) not in self._own:
            self._own[place, match_length] = Acceptance(parent=self._stats[place].acceptance(match_length))
        return self._own[place, match_length]

    def _draft(
        self, stats: DraftStats, proposer: Proposer, history: Sequence[int], tokens: int, invests: bool
    ) -> Sequence[int]:
        catch_up_s = proposer.catch_up_s(history)
        started = perf_counter()
        proposal = proposer.propose(history, tokens)
        draft_s = perf_counter() - started
        expected_s = stats.draft_s(tokens)
        if catch_up_s == 0.0:
            self._controller.announce(expected_s)
            stats.add_time(len(proposal), draft_s)
        elif invests:
            self._controller.announce(expected_s, max(0.0, draft_s - expected_s))
        else:
            self._controller.announce(expected_s + catch_up_s)
        return proposal

    def _is_worth_catching_up(
        self, proposer: Proposer, history: Sequence[int], choice: DraftLength, acceptance: Acceptance
    ) -> bool:
        """Return True if the loss budget pays for processing the text, or the expected gain on the answer does.

        Before anything was accepted, a gain is only a guess, which pays for nothing.
        """
        cost_s = proposer.catch_up_s(history)
        if cost_s == 0.0 or self._controller.affords(cost_s + choice.loss_s):
            return True
        if acceptance.is_new:
            return False
        tokens = min(self._request.max_length - len(history), _EXPECTED_TOKENS)
        gain_s = tokens * self._controller.plain_step_s() * max(0.0, 1.0 - 1.0 / choice.speed_up)
        return gain_s > _CATCH_UP_GAIN * cost_s

    def _back_off_longer(self) -> None:
        self._back_off(self._backoff)
        self._backoff, self._tries = longer_backoff(self._backoff), _TRIES

    def _back_off(self, steps: int) -> None:
        """Propose nothing in this step and the next `steps`, each of which generates one token."""
        self._backoff_until = self._length + 1 + steps
