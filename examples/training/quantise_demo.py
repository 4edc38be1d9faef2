"""Make the artifacts of the bundled models that lie in `edgekit/_demo`, and the references to their weights.

    python -m examples.training.quantise_demo    # after train_demo, or when the default recipe or its text has changed

Each is quantised as `edgekit export` does by default and sealed for a device of the catalogue, not for the machine that
makes it. `edgekit run demo` opens it, and every target packs the integers that are read out of it. Made again, it has
the same bytes but for what is measured: the memory of the tokenizer, and on another processor the steps of an 8-bit
cache. There gptq also chooses other integers, so those of the package are kept until what decides them changes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from edgekit.artifact.artifact import Artifact
from edgekit.artifact.export import export
from edgekit.artifact.rebuilding import rebuilding, write_reference
from edgekit.calibrating import calibration_for
from edgekit.common.content_store import ContentStore
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.weights_reference import BUNDLED_WEIGHTS, HeldTensor, reference_place
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.source import BUNDLED, BUNDLED_ARTIFACTS, open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest, find_recipe
from edgekit.quant.pipeline import bundled_key, neutral_weights

RECIPE = "balanced"
DEVICE = "laptop-x86-8gb"  # a generic computer, and the smallest of its kind in the catalogue
_LEAST_BYTES = 512  # a smaller tensor takes less room beside the reference than its place in it


def main() -> None:
    with tempfile.TemporaryDirectory(dir=BUNDLED_ARTIFACTS.parent) as scratch:
        made, store = Path(scratch), ContentStore(Path(scratch) / "store")
        for name in BUNDLED:
            make(name, store, made / BUNDLED_ARTIFACTS.name, made / BUNDLED_WEIGHTS.root.name)
        for place in (BUNDLED_ARTIFACTS, BUNDLED_WEIGHTS.root):
            shutil.rmtree(place, ignore_errors=True)
            (made / place.name).rename(place)


def make(name: str, store: ContentStore, artifacts: Path, references: Path) -> None:
    """Make the artifact and the reference of a bundled model; integers that are bundled already are kept."""
    source, recipe = open_source(name, need_weights=True), find_recipe(RECIPE)
    calibration = calibration_for(source, [recipe])
    (plan,) = make_plans(source, [DEVICE], PlanRequest(target="onnx", recipe=recipe))
    artifact = export(plan, artifacts / name, source=source, calibration=calibration, store=store, announce=print)
    weights = neutral_weights(source, recipe, calibration=calibration, store=store, rebuild=rebuilding(print))
    key = bundled_key(source, recipe, calibration)
    place = reference_place(ContentStore(references), key)
    held = held_by(artifact, weights)
    place.mkdir(parents=True)
    with closing(TensorFolder.open(weights.folder)) as stored:
        rest = [tensor for tensor in stored.entries if tensor not in held]
    write_reference(artifact, weights.folder, place, rest, key, os.path.relpath(artifact.folder, place), held)
    for folder in (artifact.folder, place):
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{name}: {folder.name}, {size / 2**20:.2f} MiB")


def held_by(artifact: Artifact, weights: NeutralWeights) -> Mapping[str, HeldTensor]:
    """Return the tensors of `weights` whose bytes the artifact's files hold, as they are or as float32."""
    files = {name: (artifact.folder / name).read_bytes() for name in artifact.manifest.files}
    held: dict[str, HeldTensor] = {}
    with closing(TensorFolder.open(weights.folder)) as stored:
        for name, entry in stored.entries.items():
            if entry.bytes < _LEAST_BYTES:
                continue
            spellings = [(stored.array(name).tobytes(), False)]
            if entry.dtype == "BF16":
                spellings.append((stored.floats(name).astype("<f4").tobytes(), True))
            places = (
                HeldTensor(file=file, offset=content.index(data), is_widened=is_widened)
                for data, is_widened in spellings
                for file, content in files.items()
                if data in content
            )
            found = next(places, None)
            if found is not None:
                held[name] = found
    return held


if __name__ == "__main__":
    main()
