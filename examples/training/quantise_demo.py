"""Make the artifact of the demo model that comes with edgekit, in `edgekit/_demo/artifact`.

    python -m examples.training.quantise_demo    # after train_demo, or when the default recipe or its text has changed

It is quantised as `edgekit export` does by default and sealed for a device of the catalogue, not for the machine that
makes it; `edgekit run demo` opens it. Made again on the same processor, it has the same bytes but for the measured
memory of the tokenizer; gptq chooses other integers on another processor.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from edgekit.artifact.artifact import Artifact
from edgekit.artifact.export import ExportOptions, export
from edgekit.calibrating import calibration_for
from edgekit.common.progress import Reporter
from edgekit.model.source import DEMO_ARTIFACT, open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest, find_recipe

RECIPE = "balanced"
DEVICE = "laptop-x86-8gb"  # a generic computer, and the smallest of its kind in the catalogue


def main() -> None:
    with tempfile.TemporaryDirectory(dir=DEMO_ARTIFACT.parent) as scratch:
        made = make(Path(scratch))
        shutil.rmtree(DEMO_ARTIFACT, ignore_errors=True)
        made.folder.rename(DEMO_ARTIFACT)
    source = open_source("demo")
    for name in ("config.json", "generation_config.json"):  # what `edgekit plan demo` reads without the floats
        shutil.copyfile(source.folder / name, DEMO_ARTIFACT.parent / "model" / name)


def make(folder: Path) -> Artifact:
    """Make the artifact in `folder`, with the neutral weights beside it."""
    source, recipe = open_source("demo", need_weights=True), find_recipe(RECIPE)
    calibration = calibration_for(source, [recipe])
    (plan,) = make_plans(source, [DEVICE], PlanRequest(target="onnx", recipe=recipe))
    options = ExportOptions(store=folder / "store", report=Reporter(note=print, warn=print))
    return export(plan, folder / "demo", options, source=source, calibration=calibration)


if __name__ == "__main__":
    main()
