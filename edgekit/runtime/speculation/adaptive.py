"""Adaptive drafting: in each step, ask the draft method with the highest expected speed-up, or none."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from edgekit.runtime.speculation.acceptance import Acceptance
from edgekit.runtime.speculation.controller import (
    FIRST_BACKOFF,
    LONGEST_BACKOFF,
    DraftLength,
    SpeculationController,
    longer_backoff,
)
from edgekit.runtime.speculation.drafters import Backoff

if TYPE_CHECKING:
    from edgekit.runtime.speculation.draft_method import DraftStats
    from edgekit.runtime.speculation.drafters import DraftRequest

_FIRST_TOKENS = 3  # longest proposal before the acceptance is known
_CATCH_UP_GAIN = 2.0  # least expected gain, as a multiple of the cost of processing a long prompt with the draft
_LOOKUP_LOSS = 0.0025  # share of a step that unsuccessful look-ups may cost
_TRIES = 4  # proposals in a row after a backoff
_EXPECTED_TOKENS = 256  # most remaining tokens to assume when estimating a gain


class _Method:
    """A draft method in one request: its proposer, the acceptance of its proposals, and when it is asked next."""

    def __init__(self, stats: DraftStats, request: DraftRequest) -> None:
        self.stats, self.proposer = stats, stats.method.start(request)
        self.asleep_until = 0  # length of the text at the next decision
        self.backoff = FIRST_BACKOFF
        self.tries = 0
        self._acceptances: dict[int, Acceptance] = {}

    @property
    def is_tried(self) -> bool:
        """True if the method did not pay last time, and proposes within the loss budget only."""
        return self.backoff > FIRST_BACKOFF

    def acceptance(self) -> Acceptance:
        """Return the estimate for proposals like the last one."""
        match_length = self.proposer.match_length if self.stats.is_free else 0
        if match_length not in self._acceptances:
            self._acceptances[match_length] = Acceptance(parent=self.stats.acceptance(match_length))
        return self._acceptances[match_length]

    def sleep(self, length: int, steps: int) -> None:
        """Propose nothing in the step of a text of `length` tokens, nor in the next `steps`."""
        self.asleep_until = length + 1 + steps

    def back_off(self, length: int, steps_until_affordable: float = 0.0) -> None:
        """Sleep longer every time, at least until a try is affordable: any earlier decision would be no."""
        self.sleep(length, max(self.backoff, int(min(steps_until_affordable, LONGEST_BACKOFF))))
        self.backoff, self.tries = longer_backoff(self.backoff), _TRIES

    def count_try(self, length: int, *, pays: bool) -> None:
        """Count a try. One that pays ends backing off; after too many others, back off from the next step on."""
        if pays:
            self.backoff = FIRST_BACKOFF
        elif self.tries > 1:
            self.tries -= 1
        else:
            self.back_off(length)

    def was_right(self, length: int) -> None:
        """All its tokens were accepted: the text has `length` tokens now, and the next try comes sooner."""
        self.backoff = max(FIRST_BACKOFF, self.backoff // 4)
        self.asleep_until = min(self.asleep_until, length + self.backoff)


class _Offer(NamedTuple):
    """The number of tokens that a method would propose."""

    method: _Method
    choice: DraftLength
    acceptance: Acceptance
    ready: Sequence[int]  # the proposal of a method that proposes before the length is chosen


class AdaptingDrafter:
    """Draft as much as pays. A method that does not pay backs off, and is tried a few times again later."""

    def __init__(self, request: DraftRequest, stats: Sequence[DraftStats], controller: SpeculationController) -> None:
        self._request, self._controller = request, controller
        controller.add_request(request.max_length - len(request.prompt))
        self._methods = [_Method(each, request) for each in stats]
        self._length = 0  # length of the text at the last call
        self._pending: tuple[_Offer, Sequence[int]] | None = None

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        self._pending, self._length = None, len(history)
        awake = [each for each in self._methods if each.asleep_until <= self._length]
        proposal = self._best(awake, history, limit) if awake and not self._controller.is_due_plain else ()
        if self._request.hidden is not None:
            readers = [each.asleep_until for each in self._methods if each.stats.method.reads_hidden]
            self._request.hidden.read_from = min(readers, default=0)
        steps = min(each.asleep_until for each in self._methods) - self._length - 1
        return proposal if proposal or steps <= 0 else Backoff.of(steps)

    def observe(self, accepted: Sequence[int]) -> None:
        if self._pending is None:
            return
        offer, proposal = self._pending
        right = 0
        for guess, token in zip(proposal, accepted, strict=False):
            if guess != token:
                break
            right += 1
        offer.acceptance.observe(right, len(proposal))
        offer.method.stats.add_verified(right, len(proposal))
        if right == len(proposal) and right:
            offer.method.was_right(self._length + len(accepted))

    def close(self) -> None:
        for each in self._methods:
            each.proposer.close()

    def _best(self, awake: Sequence[_Method], history: Sequence[int], limit: int) -> Sequence[int]:
        """Return the proposal of the method that promises most. Methods that should not propose now back off."""
        offers = [offer for each in awake if (offer := self._offer(each, history, limit))]
        if not offers:
            return ()
        willing = [offer for offer in offers if self._is_willing(offer, history)]
        best = max(willing or offers, key=lambda offer: offer.choice.speed_up)
        pays = best.choice.pays
        self._controller.promised, self._controller.is_overdrawn = best.choice.speed_up, pays and not willing
        if not willing:
            return ()
        best.method.count_try(self._length, pays=pays)
        if best.ready:
            proposal = best.ready[: best.choice.tokens]
            self._controller.announce(0.0, pays=pays)
        else:
            proposal = self._draft(best, history, pays=pays)
        self._pending = best, proposal
        return proposal

    def _offer(self, method: _Method, history: Sequence[int], limit: int) -> _Offer | None:
        """Choose how many tokens `method` would propose; None: a look-up found nothing."""
        stats = method.stats
        ready: Sequence[int] = ()
        most = min(limit, stats.method.tokens)
        if stats.is_free:
            ready = method.proposer.propose(history, most)
            if not ready:
                # With a small model the look-up itself takes a measurable share of each step: skip some steps.
                step_s = self._controller.plain_step_s()
                method.sleep(self._length, int(stats.method.draft_s(1) / (_LOOKUP_LOSS * step_s)))
                return None
            most = len(ready)
        acceptance = method.acceptance()
        if acceptance.is_new:
            most = min(most, _FIRST_TOKENS)
        choice = self._controller.choose(acceptance, stats, most, trying=method.is_tried)
        return _Offer(method, choice, acceptance, ready)

    def _is_willing(self, offer: _Offer, history: Sequence[int]) -> bool:
        """Return True if the method should propose now; else it backs off."""
        if offer.choice.tokens and (offer.ready or self._is_worth_catching_up(offer, history)):
            return True
        wait = 0.0  # the next look-up may find a longer match
        if not offer.ready:
            cost_s = offer.choice.loss_s + offer.method.proposer.catch_up_s(history)
            wait = self._controller.steps_until_affordable(cost_s, pays=offer.choice.pays)
        offer.method.back_off(self._length, wait)
        return False

    def _draft(self, offer: _Offer, history: Sequence[int], *, pays: bool) -> Sequence[int]:
        stats, proposer, tokens = offer.method.stats, offer.method.proposer, offer.choice.tokens
        catch_up_s = proposer.catch_up_s(history)
        started = perf_counter()
        proposal = proposer.propose(history, tokens)
        draft_s = perf_counter() - started
        expected_s = stats.draft_s(tokens)
        if catch_up_s == 0.0:
            self._controller.announce(expected_s, pays=pays)
            stats.add_time(len(proposal), draft_s)
        elif pays and not offer.acceptance.is_new:
            self._controller.announce(expected_s, max(0.0, draft_s - expected_s))
        else:
            self._controller.announce(expected_s + catch_up_s, pays=pays)
        return proposal

    def _is_worth_catching_up(self, offer: _Offer, history: Sequence[int]) -> bool:
        """Return True if the loss budget pays for processing the text, or the expected gain on the answer does.

        Before anything was accepted, a gain is only a guess, which pays for nothing.
        """
        cost_s = offer.method.proposer.catch_up_s(history)
        if cost_s == 0.0 or self._controller.affords(cost_s + offer.choice.loss_s, pays=offer.choice.pays):
            return True
        if offer.acceptance.is_new:
            return False
        tokens = min(self._request.max_length - len(history), _EXPECTED_TOKENS)
        gain_s = tokens * self._controller.plain_step_s() * max(0.0, 1.0 - 1.0 / offer.choice.speed_up)
        return gain_s > _CATCH_UP_GAIN * cost_s
