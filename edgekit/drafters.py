"""The classes that a package needs to add a drafter; entry points `edgekit.drafters` name its `DraftSource` classes."""

from __future__ import annotations

from edgekit.runtime.speculation.costs import CostProbe, known_share
from edgekit.runtime.speculation.draft_method import DraftMethod, DraftRequest, DraftSource, DraftTarget, Proposer
from edgekit.runtime.speculation.drafting import draft

__all__ = [
    "CostProbe",
    "DraftMethod",
    "DraftRequest",
    "DraftSource",
    "DraftTarget",
    "Proposer",
    "draft",
    "known_share",
]
