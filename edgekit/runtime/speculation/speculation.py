"""The draft methods of a runtime under one controller, and the report of their results."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from edgekit.common.base import Frozen
from edgekit.errors import InvalidOption
from edgekit.runtime.speculation.controller import AdaptingDrafter, DraftStats
from edgekit.runtime.speculation.draft_model import DraftModel

if TYPE_CHECKING:
    from edgekit.runtime.speculation.controller import SpeculationController
    from edgekit.runtime.speculation.draft_method import DraftMethod, DraftRequest


class Proposals(Frozen):
    """The results of one draft method."""

    name: str
    proposed: int
    accepted: int
    acceptance: tuple[float, ...]  # rate of each position, given that all before it were right
    draft_cost: float  # cost of one drafted token, in plain steps


class SpeculationReport(Frozen):
    """The gain of drafting, and why it is on or off."""

    is_on: bool
    reason: str
    proposals: tuple[Proposals, ...]
    steps: int
    drafted_steps: int
    tokens_per_step: float | None
    verify_cost: dict[int, float]  # calibrated cost of a forward by its tokens; a forward of one token costs 1
    estimated_speed_up: float | None  # expected by the latest decision
    measured_speed_up: float | None  # measured over all decoding steps
    draft_bytes: int


class Speculation:
    """The draft methods of a runtime, under one controller."""

    def __init__(self, methods: Sequence[DraftMethod], controller: SpeculationController) -> None:
        assert methods
        self.controller = controller
        self._stats = [DraftStats(method, controller.times) for method in methods]

    @property
    def tokens(self) -> int:
        return max(each.method.tokens for each in self._stats)

    @property
    def bytes(self) -> int:
        """Predicted memory in addition to the target's."""
        return sum(each.method.bytes for each in self._stats)

    def only(self, name: str) -> Speculation:
        """Return the same controller and statistics with one method: `ngram`, `early-exit`, `head` or `model`."""
        selected = copy(self)
        selected._stats = [each for each in self._stats if each.method.name.startswith(name.replace("-", " "))]
        if not selected._stats:
            known = ", ".join(each.method.name for each in self._stats)
            raise InvalidOption(f"drafting: this runtime was opened without {name}; it has {known}")
        return selected

    def start(self, request: DraftRequest) -> AdaptingDrafter:
        return AdaptingDrafter(request, self._stats, self.controller)

    def report(self) -> SpeculationReport:
        controller, latest = self.controller, self.controller.latest
        costs = controller.times.costs
        is_on = latest is not None and latest.pays and latest.tokens > 0
        return SpeculationReport(
            is_on=is_on,
            reason=self._reason(is_on),
            proposals=tuple(
                Proposals(
                    name=each.method.name,
                    proposed=each.proposed,
                    accepted=sum(each.right),
                    acceptance=tuple(right / tried for right, tried in zip(each.right, each.tried, strict=True)),
                    draft_cost=each.method.draft_s(4) / 4 / costs.one,
                )
                for each in self._stats
            ),
            steps=controller.steps,
            drafted_steps=controller.drafted_steps,
            tokens_per_step=controller.tokens / controller.steps if controller.steps else None,
            verify_cost=costs.ratios(),
            estimated_speed_up=latest.speed_up if latest else None,
            measured_speed_up=controller.plain_s / controller.spent_s if controller.spent_s else None,
            draft_bytes=self.bytes,
        )

    def interrupt(self) -> None:
        """End a running call of a draft model, from any thread; afterwards it can only be closed."""
        for each in self._stats:
            if isinstance(each.method, DraftModel):
                each.method.engine.interrupt()

    def close(self) -> None:
        for each in self._stats:
            each.method.close()

    def _reason(self, is_on: bool) -> str:
        latest = self.controller.latest
        if latest is None:
            return "nothing was proposed yet"
        if latest.pays and not is_on:
            return "its loss budget is used up; drafting resumes when the budget has grown again"
        promise = f"it promises {latest.speed_up:.2f} times the plain speed"
        return promise if is_on else f"{promise}; it is tried again from time to time"
