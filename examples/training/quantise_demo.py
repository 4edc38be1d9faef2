"""Make what comes with edgekit of the demo model: `edgekit/_demo/artifact`, and its neutral weights in `_demo/model`.

    python -m examples.training.quantise_demo    # after train_demo, or when the default recipe or its text has changed

It is quantised as `edgekit export` does by default and sealed for a device of the catalogue, not for the machine that
makes it. `edgekit run demo` opens it, or makes one of the neutral weights where onnx is not installed. Made again on
the same processor, it has the same bytes but for the measured memory of the tokenizer; gptq chooses other integers on
another processor.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from edgekit.artifact.artifact import Artifact
from edgekit.artifact.export import ExportOptions, export
from edgekit.calibrating import calibration_for
from edgekit.common.progress import Reporter
from edgekit.contracts.neutral import MANIFEST
from edgekit.model.source import DEMO_ARTIFACT, DEMO_WEIGHTS, open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest, find_recipe

RECIPE = "balanced"
DEVICE = "laptop-x86-8gb"  # a generic computer, and the smallest of its kind in the catalogue


def main() -> None:
    with tempfile.TemporaryDirectory(dir=DEMO_ARTIFACT.parent) as scratch:
        made = make(Path(scratch))
        (weights,) = (path.parent for path in Path(scratch).glob(f"store/*/{MANIFEST}"))
        for folder, place in ((made.folder, DEMO_ARTIFACT), (weights, DEMO_WEIGHTS)):
            shutil.rmtree(place, ignore_errors=True)
            folder.rename(place)


def make(folder: Path) -> Artifact:
    """Make the artifact in `folder`, with the neutral weights beside it."""
    source, recipe = open_source("demo", need_weights=True), find_recipe(RECIPE)
    calibration = calibration_for(source, [recipe])
    (plan,) = make_plans(source, [DEVICE], PlanRequest(target="onnx", recipe=recipe))
    options = ExportOptions(store=folder / "store", report=Reporter(note=print, warn=print))
    return export(plan, folder / "demo", options, source=source, calibration=calibration)


if __name__ == "__main__":
    main()
