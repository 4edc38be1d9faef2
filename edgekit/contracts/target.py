"""The contract of a target: offer, export, open, and read the weights back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from edgekit.common.base import Frozen
from edgekit.common.progress import Progress
from edgekit.contracts.engine import Engine
from edgekit.contracts.plan import MemoryFacts, Plan, SpeedFacts
from edgekit.contracts.recipe import Recipe
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.device import DeviceProfile
    from edgekit.contracts.neutral import NeutralWeights


class Offer(Frozen):
    """One way to build and run a model on a device, with the facts that price it."""

    target: str
    backend: str
    recipe: Recipe
    kv_bits: tuple[int, ...]  # widths that the cache supports, best first
    can_evict: bool = True
    max_context: int | None = None
    exits: bool = False
    adapters: bool = False
    encoders: bool = False
    hidden_states: bool = False  # for a drafting head that is sealed with the model
    memory: MemoryFacts
    speed: SpeedFacts
    only_by_name: bool = False  # taken only where its target was asked for by name, e.g. because it serves checks alone
    # A random model is exported in seconds, so the engine can be timed on `this`. Once timed, its speed decides between
    # targets, and it needs no asking for by name.
    can_be_timed: bool = False
    refusal: str | None = None  # the reason why it cannot be taken, with the fix; such an offer is only listed
    notes: tuple[str, ...] = ()  # e.g. "lowered here, never run"


class Target(Protocol):
    """A vendor runtime: its offers, its export and its engine. Importing a target imports no vendor library.

    Three further methods are optional. `missing_to_export` answers as `missing` does, where an export needs less than
    the runtime. `offer_in(model, device, backend, recipe)` returns the offer in a recipe that is not built in, such as
    a source's own integers; `refusal` says what the target cannot hold of it. Without it such a recipe is priced by the
    backend's first offer, and a source's own integers are not offered. `tensor_places(files)` returns the `TensorBytes`
    of tensors in files of a format of the target's own, so that a changed tensor is delivered alone.
    """

    name: str

    def missing(self) -> str | None:
        """Return the reason why the target cannot work on this machine, with the fix; None if it can."""

    def offers(self, model: ModelSpec, device: DeviceProfile) -> Iterable[Offer]:
        """Return every way to build `model` and run it on `device`, best quality first."""

    def export(self, plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
        """Write the artifact's files into the empty directory `out`."""

    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> Engine:
        """Open the artifact's files. `exact`: logits do not depend on the batch, or the target refuses."""

    def weights(self, plan: Plan, files: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield every tensor by the model's names, read back from the artifact's files: integer × scale."""


class OperatorTime(Frozen):
    """One kind of operator in one phase of a profile."""

    name: str
    calls: int
    total_s: float
    part_of: str | None = None  # the operator that contains it, whose time includes this time


class Phase(Frozen):
    """A part of one request, timed by the vendor's runtime."""

    name: Literal["prefill", "decode"]
    tokens: int
    steps: int  # calls of the model
    total_s: float
    operators: tuple[OperatorTime, ...]  # most expensive first


class Profile(Frozen):
    """The time of one request by operator, after a warm-up; profiling slows it down."""

    threads: int
    phases: tuple[Phase, ...]


class CanProfile(Protocol):
    """An optional ability of a target: it has a method `profile`."""

    def profile(self, plan: Plan, files: Path, tokens: Sequence[int], decoded: int) -> Profile:
        """Prefill `tokens` and decode `decoded` more, with every operator timed by the vendor's runtime."""
