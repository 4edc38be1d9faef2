"""Results of tasks, as reports store them."""

from __future__ import annotations

from typing import Literal

from edgekit.apps.bench.tasks.statistics import PairedDifference, ShareInterval
from edgekit.common.base import Frozen


class TaskOutcome(Frozen):
    """The judgement of one item."""

    id: str
    group: str = ""
    right: bool
    why: str = ""  # the error; empty if right


class GroupResult(Frozen):
    """The result of one part of a data set."""

    name: str
    share: ShareInterval


class TaskResult(Frozen):
    """The result of one artifact on one task."""

    task: str
    title: str
    artifact: str
    artifact_sha256: str
    model: str
    target: str
    backend: str
    recipe: str
    data_sha256: tuple[str, ...]
    seed: int
    temperature: float
    share: ShareInterval
    unanswered: int = 0  # questions that exceed the context; they count as wrong
    groups: tuple[GroupResult, ...] = ()
    seconds: float  # wall time of answering, without judging
    processor_s: float  # processor time of all threads, which other load on the machine affects less
    outcomes: tuple[TaskOutcome, ...]

    @property
    def label(self) -> str:
        return f"{self.artifact} ({self.model}, {self.target}, {self.recipe})"


class TaskComparison(Frozen):
    """The comparison of two artifacts on the same items of one task."""

    task: str
    artifact: str
    reference: str
    paired: PairedDifference


class TaskReport(Frozen):
    """The results of every task on every artifact."""

    version: Literal[1] = 1
    kind: Literal["tasks"] = "tasks"
    results: tuple[TaskResult, ...]
    comparisons: tuple[TaskComparison, ...] = ()
