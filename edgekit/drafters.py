"""The names that a package needs to add a drafter, such as a sealed head's weights and the frequencies of its ropes.

Entry points `edgekit.drafters` name its `DraftSource` classes.
"""

from __future__ import annotations

from edgekit.model.heads import HeadWeights
from edgekit.model.rope import frequencies, rotated_pairs
from edgekit.runtime.speculation.costs import CostProbe, known_share
from edgekit.runtime.speculation.draft_method import DraftMethod, DraftRequest, DraftSource, DraftTarget, Proposer
from edgekit.runtime.speculation.drafting import draft

__all__ = [
    "CostProbe",
    "DraftMethod",
    "DraftRequest",
    "DraftSource",
    "DraftTarget",
    "HeadWeights",
    "Proposer",
    "draft",
    "frequencies",
    "known_share",
    "rotated_pairs",
]
