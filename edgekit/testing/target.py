"""A fake target, with a model, a plan and artifacts for it.

Its artifacts are sealed like real ones; its engine is a `FakeEngine`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekit.artifact.artifact import Artifact, seal
from edgekit.common.files import write_file
from edgekit.common.parsing import read_json
from edgekit.common.staging import staging_for
from edgekit.contracts.capabilities import Capabilities, Feature
from edgekit.contracts.plan import Plan, SpeedFacts
from edgekit.contracts.recipe import RECIPES, Recipe
from edgekit.contracts.target import Offer, Target
from edgekit.errors import InvalidInput, quote_short
from edgekit.model.spec import ModelSpec
from edgekit.testing.engine import FakeEngine
from edgekit.testing.plan import FAKE, MEMORY, fake_plan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.common.progress import Progress
    from edgekit.contracts.device import DeviceProfile
    from edgekit.contracts.neutral import NeutralWeights

_SPEED = SpeedFacts(bandwidth_share=0.5, prefill_shares=(("fp32", 0.5),), source="nothing is measured: a fake")


class FakeTarget(Target):
    """A target that runs anywhere; its artifacts hold only the seed of a `FakeEngine`."""

    name = FAKE
    backends = ("cpu",)

    def missing(self) -> str | None:
        return None

    def capabilities(self, model: ModelSpec, recipe: Recipe, backend: str, context: int) -> Capabilities:
        features = frozenset[Feature]({"evictions", "exits", "adapters"})
        return Capabilities(vocabulary=model.vocab_size, kv_bits=(16, 8), features=features, exact="always")

    def recipes(self, model: ModelSpec, device: DeviceProfile, backend: str) -> Iterable[Recipe]:
        return RECIPES["float32"], RECIPES["s4-g32"]

    def offer(self, model: ModelSpec, device: DeviceProfile, backend: str, recipe: Recipe) -> Offer:
        able = self.capabilities(model, recipe, backend, model.max_positions)
        return Offer(target=self.name, backend=backend, recipe=recipe, capabilities=able, memory=MEMORY, speed=_SPEED)

    def export(self, plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
        seed = int(weights.manifest.weights_sha256[:8], 16)
        write_file(out / "fake.json", json.dumps({"seed": seed}).encode())
        progress(1, 1, "exported")

    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> FakeEngine:
        content = read_json(files / "fake.json")
        seed = content.get("seed")
        if not isinstance(seed, int) or seed < 0:
            raise InvalidInput(f"{files / 'fake.json'}: seed must be a whole number, found {quote_short(seed)}")
        return FakeEngine(
            vocabulary=plan.model.vocab_size,
            layers=len(plan.model.layers),
            seed=seed,
            max_states=plan.sequences,
            max_chunk_tokens=plan.chunk_tokens,
        )

    def weights(self, plan: Plan, files: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield random weights, made from the seed."""
        import numpy as np

        seed = read_json(files / "fake.json")["seed"]
        for index, tensor in enumerate(plan.model.tensors()):
            yield tensor.name, np.random.default_rng([seed, index]).standard_normal(tensor.shape, np.float32)


def fake_artifact(
    folder: Path, *, files: Mapping[str, bytes | str | dict[str, Any]], plan: Plan | None = None, seed: int = 0
) -> Artifact:
    """Seal an artifact of the fake target at `folder`, with `files` (at least tokenizer.json) and `fake.json`."""
    staging = staging_for(folder, 1 << 20)
    for name, content in {"fake.json": {"seed": seed}, **files}.items():
        text = json.dumps(content) if isinstance(content, dict) else content
        write_file(staging / name, text.encode() if isinstance(text, str) else text)
    return seal(staging, folder, plan or fake_plan(), weights_sha256="0" * 64, tools={"fake": "1"}, self_check="a fake")


def install_fake_target(folder: Path) -> None:
    """Write the metadata of a package to `folder`, so that the fake target is found with `folder` on `sys.path`."""
    info = folder / "edgekit_fake-1.dist-info"
    write_file(info / "METADATA", b"Metadata-Version: 2.1\nName: edgekit-fake\nVersion: 1\n")
    write_file(info / "entry_points.txt", b"[edgekit.targets]\nfake = edgekit.testing:FakeTarget\n")
