"""A fake target, with a model, a plan and artifacts for it.

Its artifacts are sealed like real ones; its engine is a `FakeEngine`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekit.artifact.artifact import Artifact, seal, staging_for
from edgekit.common.files import write_file
from edgekit.common.parsing import read_json
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.plan import MemoryFacts, Plan, Quality, Speed, SpeedFacts
from edgekit.contracts.recipe import RECIPES
from edgekit.contracts.target import Offer, Target
from edgekit.errors import InvalidInput, quote_short
from edgekit.model.parts import Layer, Rope
from edgekit.model.spec import ModelSpec
from edgekit.planner.memory import MemoryLoad, predict
from edgekit.testing.engine import FakeEngine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.common.progress import Progress
    from edgekit.contracts.device import DeviceProfile
    from edgekit.contracts.neutral import NeutralWeights

_MEMORY = MemoryFacts(mapped_share=0.0, private_share=1.0, runtime_bytes=1 << 20, source="nothing is measured: a fake")
_SPEED = SpeedFacts(bandwidth_share=0.5, prefill_shares=(("fp32", 0.5),), source="nothing is measured: a fake")


class FakeTarget(Target):
    """A target that runs anywhere; its artifacts hold only the seed of a `FakeEngine`."""

    name = "fake"

    def missing(self) -> str | None:
        return None

    def offers(self, model: ModelSpec, device: DeviceProfile) -> Iterable[Offer]:
        for backend in device.targets.get(self.name, ()):
            for recipe in ("float32", "s4-g32"):
                yield Offer(
                    target=self.name,
                    backend=backend,
                    recipe=RECIPES[recipe],
                    kv_bits=(16, 8),
                    exits=True,
                    adapters=True,
                    memory=_MEMORY,
                    speed=_SPEED,
                )

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


def fake_model(*, vocabulary: int = 300, layers: int = 2, eos_ids: tuple[int, ...] = (0,)) -> ModelSpec:
    """Return a small model of the Llama family."""
    return ModelSpec(
        name="fake",
        family="llama",
        hidden_size=64,
        intermediate_size=128,
        heads=2,
        vocab_size=vocabulary,
        layers=(Layer(kv_heads=1, head_dim=32),) * layers,
        ropes={"default": Rope(theta=10000.0, dim=32)},
        max_positions=4096,
        norm_epsilon=1e-5,
        attention_scale=32**-0.5,
        tied=True,
        bos_id=1,
        eos_ids=eos_ids,
    )


def fake_plan(
    model: ModelSpec | None = None,
    *,
    context: int = 512,
    sequences: int = 4,
    chunk_tokens: int = 64,
    cache: KVEvictionPolicy | None = None,
) -> Plan:
    """Return a plan for the fake target, estimated like any other."""
    model, cache, recipe = model or fake_model(), cache or KVEvictionPolicy(), RECIPES["float32"]
    capacity = cache.window or context
    load = MemoryLoad(model, recipe, _MEMORY, capacity, sequences, kv_bits=16, chunk_tokens=chunk_tokens)
    return Plan(
        model=model,
        model_source="fake",
        model_sha256="0" * 64,
        device="fake",
        device_sha256="0" * 64,
        os_version="1",
        target=FakeTarget.name,
        backend="cpu",
        recipe=recipe,
        context=context,
        sequences=sequences,
        chunk_tokens=chunk_tokens,
        cache=cache,
        storage=KVCacheConfig(capacity_tokens=capacity, kv_bits=16),
        threads=1,
        estimate=predict(load),
        memory=_MEMORY,
        budget_bytes=1 << 40,
        budget_why="a fake device",
        speed=Speed(prefill_tokens_per_s=None, decode_tokens_per_s=1.0, first_token_s=None, basis="a fake"),
        quality=Quality(kl=0.0, same_top=1.0, basis="prior", source="a fake"),
    )


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
