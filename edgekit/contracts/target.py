"""The contract of a target: offer, export, open, and read the weights back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edgekit.common.base import Frozen
from edgekit.common.progress import Progress
from edgekit.contracts.capabilities import Capabilities, plan_refusal, recipe_refusal
from edgekit.contracts.engine import Engine
from edgekit.contracts.memory import ExportCosts, MemoryLoad, Term, usual_terms
from edgekit.contracts.plan import MemoryFacts, Plan, SpeedFacts
from edgekit.contracts.recipe import Recipe, of_model
from edgekit.errors import Unsupported, quote_short
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.contracts.device import DeviceProfile
    from edgekit.contracts.neutral import NeutralWeights
    from edgekit.formats.safetensors import TensorBytes


class Offer(Frozen):
    """One way to build and run a model on a device, with the facts for estimating its memory and speed."""

    target: str
    backend: str
    recipe: Recipe
    capabilities: Capabilities
    memory: MemoryFacts
    speed: SpeedFacts
    only_by_name: bool = False  # considered only if a request names its target, e.g. a target for checks
    # Exporting a random model takes seconds, so the engine can be timed on `this`. Once timed, its speed decides
    # between targets, even if `only_by_name`.
    can_be_timed: bool = False
    unavailable: str | None = None  # why it cannot run on this device, with the fix
    notes: tuple[str, ...] = ()  # e.g. "lowered here, never run"

    @property
    def refusal(self) -> str | None:
        """The reason why it cannot be chosen, with the fix; such an offer is only listed."""
        return self.unavailable or recipe_refusal(self.recipe, self.capabilities)


class KVRounding(Protocol):
    """Rounds the "keys" or "values" [kv_head, token, dim] of a layer as a cache gives them back."""

    def __call__(self, layer: int, kind: str, values: NDArray[np.float32]) -> NDArray[np.float32]: ...


class Target(ABC):
    """A vendor runtime: its offers, its export and its engine. Every target derives this class.

    Importing a target imports no vendor library. Methods that are not abstract are optional.
    """

    name: str
    backends: tuple[str, ...]
    export_costs = ExportCosts()
    copied_share = 0.0  # private bytes per byte of stored weights, of an opening that cannot map them as planned

    @abstractmethod
    def missing(self) -> str | None:
        """Return the reason why the target cannot work on this machine, with the fix; None if it can."""

    def missing_to_export(self) -> str | None:
        """Return the reason why it cannot export here, where that needs less than running."""
        return self.missing()

    @abstractmethod
    def capabilities(self, model: ModelSpec, recipe: Recipe, backend: str, context: int) -> Capabilities:
        """Return what a backend can do with the model in this recipe, in texts of up to `context` tokens."""

    def check(self, plan: Plan) -> None:
        """Raise `Unsupported` unless the plan's backend can run it."""
        if plan.backend not in self.backends:
            known = ", ".join(self.backends)
            raise Unsupported(f"{self.name}: no backend {quote_short(plan.backend)}; choose one of {known}")
        reason = plan_refusal(plan, self.capabilities(plan.model, plan.recipe, plan.backend, plan.context))
        if reason is not None:
            raise Unsupported(f"{self.name} on {plan.backend}: {reason}")

    @abstractmethod
    def recipes(self, model: ModelSpec, device: DeviceProfile, backend: str) -> Iterable[Recipe]:
        """Return the recipes to choose from on a backend of `device`, best quality first."""

    @abstractmethod
    def offer(self, model: ModelSpec, device: DeviceProfile, backend: str, recipe: Recipe) -> Offer:
        """Return the offer in any recipe; its `refusal` names what cannot be stored."""

    def offers(self, model: ModelSpec, device: DeviceProfile) -> Iterator[Offer]:
        """Yield every way to build `model` and run it on `device`: in the device's order of backends."""
        for backend in device.targets.get(self.name, ()):
            if backend in self.backends:
                for recipe in self.recipes(model, device, backend):
                    yield self.offer(model, device, backend, self.fitted(recipe, model))

    def fitted(self, recipe: Recipe, model: ModelSpec) -> Recipe:
        """Return a recipe with the rules that suit a model and this target's formats; by default `of_model`."""
        return of_model(recipe, model)

    def memory(self, load: MemoryLoad) -> Iterable[Term]:
        """Return the terms of all that the target has in memory and on disk, each with its reason.

        By default weights are copied, and each cache and each step are allocated as they are asked for.
        """
        return usual_terms(load)

    def adapt(self, plan: Plan) -> Plan:
        """Return the plan as this machine can run it: fewer `gpu_layers`, or a CPU's memory where there is no GPU."""
        return plan

    def devices(self) -> list[str]:
        """Describe the devices that the library sees here, for `edgekit doctor`."""
        return []

    @abstractmethod
    def export(self, plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
        """Write the artifact's files into the empty directory `out`."""

    @abstractmethod
    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> Engine:
        """Open the artifact's files. `exact`: refuse unless logits are independent of batching."""

    def weights(self, plan: Plan, files: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield (name in the model, values) of every tensor, dequantised from the artifact's files."""
        raise Unsupported(f"the {self.name} target cannot unpack its weights, so they are not compared")

    def kv_rounding(self, plan: Plan, kv_bits: int) -> KVRounding | None:
        """Return how a cache of `kv_bits` rounds, for the self-check. None: its cost is measured, not judged."""
        return None

    def input_blocks(self, plan: Plan, weights: NeutralWeights) -> Mapping[str, int] | None:
        """Return for every module how many of its inputs share a scale when the engine rounds them to 8 bits.

        Modules that are left out take floats. None: all inputs of a token share one scale.
        """
        return None

    def tensor_places(self, files: Path) -> list[TensorBytes]:
        """Return where tensors lie in the target's own file formats, so that an update delivers only changed ones."""
        return []
