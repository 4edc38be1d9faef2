"""Sources of draft methods: what the option `draft` can name. Entry points `edgekit.drafters` add sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from edgekit.artifact.artifact import Artifact
    from edgekit.contracts.engine import Engine
    from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
    from edgekit.contracts.plan import Plan
    from edgekit.runtime.generation.tokenizer import Codec
    from edgekit.runtime.speculation.costs import Costs
    from edgekit.runtime.speculation.draft_method import DraftMethod


class DraftTarget(NamedTuple):
    """The open model that a method drafts for."""

    engine: Engine
    artifact: Artifact
    codec: Codec
    costs: Costs  # of its calls
    policy: KVEvictionPolicy
    kv_config: KVCacheConfig


class DraftSource(ABC):
    """Opens one kind of draft method. The option is its name, or `NAME:ARGUMENT`."""

    def check(self, argument: str) -> None:  # noqa: B027 - optional, like all but `open`
        """Refuse a wrong argument before anything is loaded. Raises `InvalidInput`."""

    def suits(self, plan: Plan) -> bool:
        """Return whether `draft="auto"` uses this source with the artifact of `plan`."""
        return False

    def reads_hidden(self, plan: Plan) -> bool:
        """Return whether its methods read the target's hidden states, which take memory."""
        return False

    def private_bytes(self, argument: str, plan: Plan, tokens: int, sequences: int) -> int:
        """Predict the private memory of drafting for `sequences` texts of `tokens` tokens."""
        return 0

    @abstractmethod
    def open(self, argument: str, target: DraftTarget) -> DraftMethod:
        """Open the method, which the runtime closes. Raises `Unsupported` if this artifact does not have it."""
