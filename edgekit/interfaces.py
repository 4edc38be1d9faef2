"""The contracts between the loop, the targets and the lab. Importing this module loads no vendor library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from edgekit.cache import Storage
from edgekit.frozen import Frozen
from edgekit.model import ModelSpec
from edgekit.plan import MemoryFacts, Plan, SpeedFacts
from edgekit.recipe import Recipe

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.device import DeviceProfile
    from edgekit.weights.neutral import NeutralWeights

    Logits = NDArray[np.float32]  # [rows, vocabulary]


class Progress(Protocol):
    """Where long work tells how far it is; called with the units done, their total and what is being done."""

    def __call__(self, done: float, total: float, what: str) -> None: ...


class Offer(Frozen):
    """One way to build and run a model on a device: a target's word that it can do it, and what it would cost."""

    target: str
    backend: str
    recipe: Recipe
    kv_bits: tuple[int, ...]  # that the cache can hold, best first
    can_evict: bool = True
    max_context: int | None = None
    exits: bool = False
    adapters: bool = False
    memory: MemoryFacts
    speed: SpeedFacts
    refusal: str | None = None  # why it cannot be taken, with the cure; such an offer is only shown
    notes: tuple[str, ...] = ()  # e.g. "lowered here, never run"


class Abilities(Frozen):
    """What an engine can do; what is not stated here is refused by name."""

    vocabulary: int
    max_states: int
    max_chunk_tokens: int
    max_rewind: int | None = None  # None: any number of held tokens
    max_position: int | None = None  # None: no bound but the capacity
    kv_bits: tuple[int, ...]  # best first
    can_evict: bool = True
    can_save: bool = True
    exits: tuple[int, ...] = ()
    adapters: bool = False
    exact: Literal["always", "on_request", "never"]


class Segment(Protocol):
    """The KV of a run of tokens, outside a state."""

    @property
    def bytes(self) -> int: ...
    @property
    def tokens(self) -> int: ...

    def head(self, count: int) -> Segment:
        """Its first `count` tokens, in the same memory: to restore at once."""

    def split(self, count: int) -> tuple[Segment, Segment]:
        """The first `count` tokens and the others, each in memory of its own."""

    def write(self, path: Path) -> None: ...


class State(Protocol):
    """What one sequence has fed to an engine."""

    @property
    def position(self) -> int:
        """Tokens fed so far, evicted ones included."""

    @property
    def length(self) -> int:
        """Tokens held."""

    @property
    def bytes(self) -> int: ...

    def rewind(self, count: int) -> None:
        """Forget the last `count` tokens, however many forwards fed them; at most `abilities.max_rewind`."""

    def evict(self, start: int, stop: int) -> None:
        """Drop held tokens and close the gap in rotary distance."""

    def save(self, start: int, stop: int) -> Segment:
        """A copy of the KV of those tokens; only before the first eviction."""

    def restore(self, segment: Segment) -> None:
        """Append a saved segment."""

    def close(self) -> None: ...


class Chunk(NamedTuple):
    """Tokens to append to a state; the logits after the last `rows` come back. `exit` stops after that layer."""

    state: State
    tokens: Sequence[int]
    rows: int
    exit: int | None = None


class Engine(Protocol):
    """One loaded model. Owned by one Runtime, not thread-safe."""

    abilities: Abilities

    @property
    def notes(self) -> tuple[str, ...]:
        """What it has to say of how it runs here, where that is not how it was planned."""

    def start(self, storage: Storage) -> State: ...

    def state_bytes(self, storage: Storage) -> int:
        """What `start` would take, exactly."""

    def forward(self, chunks: Sequence[Chunk]) -> list[Logits]:
        """Append each chunk's tokens to its state; return the logits after the last `rows` of them.

        If it raises, the states of that call are dead and closed; the others live.
        """

    def read_segment(self, path: Path) -> Segment:
        """What `Segment.write` wrote; refused unless it is whole and of this model's shapes."""

    def load_adapter(self, name: str, files: Path) -> int:
        """Make the LoRA in the PEFT folder `files` ready for `Storage(adapter=name)`; the bytes that it takes."""

    def drop_adapter(self, name: str) -> None:
        """Forget it; refused while a state runs it."""

    def close(self) -> None: ...


class Target(Protocol):
    """What a vendor runtime can build, how it builds it, how it opens it. Importing one imports no vendor library."""

    name: str

    def missing(self) -> str | None:
        """Why it cannot work on this machine, and the cure; None when it can."""

    def offers(self, model: ModelSpec, device: DeviceProfile) -> Iterable[Offer]:
        """Every way it can build `model` and run it on `device`, best quality first."""

    def export(self, plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
        """Write the artifact's files into the empty directory `out`."""

    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> Engine: ...

    def weights(self, plan: Plan, files: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Every tensor of the model, by the model's names, as the artifact's own files hold it: integer × scale."""


class OperatorTime(Frozen):
    """One kind of operator in one phase of a profile."""

    name: str
    calls: int
    total_s: float
    part_of: str | None = None  # the operator that contains it, and whose time holds this time as well


class Phase(Frozen):
    """A stretch of one request under the clock of the vendor's own runtime."""

    name: Literal["prefill", "decode"]
    tokens: int
    steps: int  # calls of the model
    total_s: float
    operators: tuple[OperatorTime, ...]  # most expensive first


class Profile(Frozen):
    """Where the time of one request goes; warm, and slower than unwatched."""

    threads: int
    phases: tuple[Phase, ...]


class CanProfile(Protocol):
    """What a target may be able to do besides; found by the name of the method, and refused where it has none."""

    def profile(self, plan: Plan, files: Path, tokens: Sequence[int], decoded: int) -> Profile:
        """Prefill `tokens`, then decode so many more, with every operator timed by the vendor's runtime."""


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` tokens that may come next; none when it has nothing to say."""

    def observe(self, accepted: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class Device(Protocol):
    """One machine of the lab."""

    name: str
    profile: DeviceProfile

    def acquire(self, *, timeout_s: float) -> AbstractContextManager[None]: ...

    def measure(self, artifact: Path, workload: Any, *, timeout_s: float) -> Any: ...
