"""Choice between engines by their measured speed, on the machine that measured it. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from edgekit.contracts.device import THIS, DeviceProfile
from edgekit.contracts.plan import Speed, SpeedFacts
from edgekit.contracts.recipe import Recipe, named_recipe
from edgekit.contracts.target import Offer
from edgekit.contracts.token_costs import operations_per_token, touched_weight_bytes
from edgekit.device.engine_speeds import PROMPT, RECIPE, EngineSpeed, class_of, random_model
from edgekit.model.spec import ModelSpec

ANSWER_TOKENS = 128  # answer length of the request by which engines are compared


class TimedEngines(NamedTuple):
    """The engine speeds measured on this machine, for models of one size; may be empty."""

    speeds: Mapping[str, EngineSpeed] = {}  # by target; only its first backend is timed

    def of(self, offer: Offer, device: DeviceProfile) -> EngineSpeed | None:
        """Return the measured speed of an offer's engine; None if it was not timed on this device."""
        backends = device.targets.get(offer.target, ())
        if device.name != THIS or not offer.can_be_timed or backends[:1] != (offer.backend,):
            return None
        return self.speeds.get(offer.target)

    def price(self, model: ModelSpec, offer: Offer, device: DeviceProfile) -> Offer:
        """Return the offer with its measured speed. A request need not name a timed engine."""
        timed = self.of(offer, device)
        if timed is None:
            return offer
        return offer.model_copy(update={"speed": _facts(model, offer, device, timed), "only_by_name": False})

    def request_s(self, offer: Offer, device: DeviceProfile, speed: Speed) -> float:
        """Return the seconds of a typical request; infinite where the engine was not timed."""
        if self.of(offer, device) is None:
            return float("inf")
        return (speed.first_token_s or 0.0) + ANSWER_TOKENS / speed.decode_tokens_per_s

    def notes(self, device: DeviceProfile, priced: Sequence[tuple[Offer, Speed]], recipe: Recipe) -> Iterator[str]:
        """Yield a note with the request times of all engines that were compared for this recipe."""
        seconds = {
            f"{offer.target} {offer.backend}": self.request_s(offer, device, speed)
            for offer, speed in priced
            if offer.recipe == recipe and self.of(offer, device)
        }
        if len(seconds) > 1:
            times = ", ".join(f"{name} {value:.2g}" for name, value in seconds.items())
            yield f"the engine was chosen by its speed on this machine; seconds of a request: {times}"


def _facts(model: ModelSpec, offer: Offer, device: DeviceProfile, timed: EngineSpeed) -> SpeedFacts:
    """Convert the timing of a random model of this size to shares of the device's bandwidth and compute."""
    random = random_model(class_of(model))
    read = touched_weight_bytes(random, named_recipe(RECIPE), offer.memory) / timed.step_s
    prefill_shares = offer.speed.prefill_shares
    reached, _ = device.engine_figures(offer.target, offer.backend)
    if device.fp32_tflops is not None:
        operations = operations_per_token(random) * PROMPT / timed.prompt_s
        prefill_shares = (("fp32", operations / (device.fp32_tflops.value * 1e12)),)
    return SpeedFacts(
        bandwidth_share=read / (reached.value * 1e9),
        is_timed=True,
        prefill_shares=prefill_shares,
        cache_shares=offer.speed.cache_shares,
        source=f"timed on this machine with a random model of {random.parameters / 1e6:,.0f} million parameters: "
        f"{PROMPT / timed.prompt_s:,.0f} tokens/s of prompt, {timed.step_s * 1000:.3g} ms a decoded token",
    )
