"""Speculation of one runtime: its proposers, its pace, and what they came to."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from edgekit.errors import InvalidInput
from edgekit.frozen import Frozen
from edgekit.runtime.drafting.adapting import AdaptingDrafter, Record

if TYPE_CHECKING:
    from edgekit.runtime.drafting.adapting import Kind
    from edgekit.runtime.drafting.pace import Pace
    from edgekit.runtime.drafting.request import Request


class Proposals(Frozen):
    """What one kind of proposer came to."""

    name: str
    proposed: int
    accepted: int
    acceptance: tuple[float, ...]  # of place i, when all before it were right
    draft_cost: float  # of one drafted token, as a share of a plain step


class SpeculationReport(Frozen):
    """What drafting gained, and why it is on or off."""

    is_on: bool
    reason: str
    proposals: tuple[Proposals, ...]
    steps: int
    drafted_steps: int
    tokens_per_step: float | None
    verify_cost: dict[int, float]  # of a forward of so many tokens, in forwards of one: as measured when calibrated
    estimated_speed_up: float | None  # that the newest decision counts on
    measured_speed_up: float | None  # over all decoding so far
    draft_bytes: int


class Speculation:
    """Every proposer that a runtime may ask, under one pace."""

    def __init__(self, kinds: Sequence[Kind], pace: Pace) -> None:
        assert kinds
        self.pace = pace
        self._records = [Record(kind, pace) for kind in kinds]

    @property
    def tokens(self) -> int:
        return max(record.kind.tokens for record in self._records)

    @property
    def bytes(self) -> int:
        """Memory beside the target's own, as predicted."""
        return sum(record.kind.bytes for record in self._records)

    def only(self, way: str) -> Speculation:
        """The same pace and experience with one way of drafting: `ngram`, `early-exit` or `model`."""
        found = copy(self)
        found._records = [one for one in self._records if one.kind.name.startswith(way.replace("-", " "))]
        if not found._records:
            known = ", ".join(one.kind.name for one in self._records)
            raise InvalidInput(f"drafting: this runtime was opened without {way}; it has {known}")
        return found

    def start(self, request: Request) -> AdaptingDrafter:
        return AdaptingDrafter(request, self._records, self.pace)

    def report(self) -> SpeculationReport:
        pace = self.pace
        promised = pace.promised
        is_on = promised is not None and pace.pays(promised) and not pace.in_debt
        plain = pace.costs.one
        return SpeculationReport(
            is_on=is_on,
            reason=self._reason(is_on),
            proposals=tuple(
                Proposals(
                    name=record.kind.name,
                    proposed=record.proposed,
                    accepted=record.accepted,
                    acceptance=tuple(right / tried for right, tried in zip(record.right, record.tried, strict=True)),
                    draft_cost=record.kind.draft_s(4) / 4 / plain,
                )
                for record in self._records
            ),
            steps=pace.steps,
            drafted_steps=pace.drafted_steps,
            tokens_per_step=pace.tokens / pace.steps if pace.steps else None,
            verify_cost=pace.costs.ratios(),
            estimated_speed_up=promised,
            measured_speed_up=pace.plain_s / pace.spent_s if pace.spent_s else None,
            draft_bytes=self.bytes,
        )

    def close(self) -> None:
        for record in self._records:
            record.kind.close()

    def _reason(self, is_on: bool) -> str:
        promised = self.pace.promised
        if promised is None:
            return "nothing was proposed yet"
        if is_on:
            return f"it promises {promised:.2f} times the plain speed"
        if self.pace.pays_but_for_debt:
            return "it lost what it may lose, and waits until that is made good"
        return f"it promises {promised:.2f} times the plain speed; it is tried again from time to time"
