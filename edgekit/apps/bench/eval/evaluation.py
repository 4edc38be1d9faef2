"""Evaluations as data; the comparison with the float model becomes a fact that plans use."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.divergence import Divergence

CheckedProperty = Literal["model", "template", "tokens", "bos", "end of text", "weights", "positions", "answers"]


class Check(Frozen):
    """A property that must be the same in two models."""

    what: CheckedProperty
    same: bool | None  # None: it could not be compared
    detail: str = ""


class TaskScore(Frozen):
    """The score of one kind of task."""

    kind: Literal["choice", "exact", "tool"]
    asked: int
    right: int
    error: float  # standard error of the share
    failures: tuple[str, ...] = Field(default=(), max_length=20)  # reasons of the first failures

    @property
    def share(self) -> float:
        return self.right / self.asked


class Evaluation(Frozen):
    """The evaluation of one artifact against a reference."""

    version: Literal[1] = 1
    kind: Literal["evaluation"] = "evaluation"
    artifact_sha256: str
    weights_sha256: str
    model: str
    target: str
    backend: str
    recipe: str
    reference: str  # the name of the reference
    text: str
    text_sha256: str
    window_tokens: int
    divergence: Divergence | None
    checks: tuple[Check, ...] = ()
    tasks: tuple[TaskScore, ...] = ()
    file_bytes: int
    bits_per_weight: float
    fact: str | None = None  # the name under which plans find it; None: not stored
    notes: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return all(check.same for check in self.checks)
