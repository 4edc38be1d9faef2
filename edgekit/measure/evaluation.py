"""What was found of an artifact's quality, as data; the first part of it becomes a fact that plans use."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgekit.frozen import Frozen
from edgekit.measure.divergence import Divergence


class Check(Frozen):
    """Something that must be the same as in the reference's own files."""

    what: Literal["template", "tokens", "bos", "end of text"]
    same: bool
    detail: str = ""


class TaskScore(Frozen):
    """One kind of task."""

    kind: Literal["choice", "exact", "tool"]
    asked: int
    right: int
    error: float  # standard error of the share
    failures: tuple[str, ...] = Field(default=(), max_length=20)  # why, of the first ones

    @property
    def share(self) -> float:
        return self.right / self.asked


class Evaluation(Frozen):
    """One artifact against a reference."""

    version: Literal[1] = 1
    kind: Literal["evaluation"] = "evaluation"
    artifact_sha256: str
    weights_sha256: str
    model: str
    target: str
    backend: str
    recipe: str
    reference: str  # what it was compared with
    text: str
    text_sha256: str
    window_tokens: int
    divergence: Divergence | None
    checks: tuple[Check, ...] = ()
    tasks: tuple[TaskScore, ...] = ()
    file_bytes: int
    bits_per_weight: float
    fact: str | None = None  # under which name plans find it; None: not kept
    notes: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return all(check.same for check in self.checks)
