"""Quantise the bundled models as `edgekit export` does by default, into `edgekit/_demo/weights`.

    python -m examples.training.quantise_demo    # after train_demo, or when the default recipe or its text has changed

The wheel carries the result, so that the demo can be packed for any device without torch.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from edgekit.api import calibration_for
from edgekit.artifact.weights_copy import copy_weights
from edgekit.common.content_store import ContentStore
from edgekit.model.source import BUNDLED, open_source
from edgekit.planner.request import find_recipe
from edgekit.quant.pipeline import BUNDLED_WEIGHTS, bundled_key, neutral_weights

RECIPE = "balanced"


def main() -> None:
    made = [quantise(name) for name in BUNDLED]
    for place in BUNDLED_WEIGHTS.iterdir():
        if place not in made:
            shutil.rmtree(place)


def quantise(name: str) -> Path:
    """Make the weights of a bundled model where they are missing, and return their folder."""
    source, recipe = open_source(name, need_weights=True), find_recipe(RECIPE)
    calibration = calibration_for(source, [recipe])
    place = BUNDLED_WEIGHTS / bundled_key(source, recipe, calibration)
    if not place.exists():
        with tempfile.TemporaryDirectory() as scratch:
            weights = neutral_weights(source, recipe, calibration=calibration, store=ContentStore(Path(scratch)))
            BUNDLED_WEIGHTS.mkdir(exist_ok=True)
            copy_weights(weights, place)
    print(f"{place}: {name}, {sum(file.stat().st_size for file in place.iterdir()) / 2**20:.1f} MiB")
    return place


if __name__ == "__main__":
    main()
