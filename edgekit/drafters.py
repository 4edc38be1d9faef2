"""The classes that a package needs to add a drafter; entry points `edgekit.drafters` name its `DraftSource` classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.common.lazy import lazy

if TYPE_CHECKING:
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

__getattr__ = lazy(
    __name__,
    {
        "edgekit.runtime.speculation.costs": ["CostProbe", "known_share"],
        "edgekit.runtime.speculation.draft_method": [
            "DraftMethod",
            "DraftRequest",
            "DraftSource",
            "DraftTarget",
            "Proposer",
        ],
        "edgekit.runtime.speculation.drafting": ["draft"],
    },
)
