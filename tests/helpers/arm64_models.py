"""Tiny models that are exported here and checked on another processor: the first step needs torch, the second none.

python tests/helpers/arm64_models.py export FOLDER
python tests/helpers/arm64_models.py check FOLDER [NAME...]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.exactness import inexact
from edgekit_onnx.export import export

from edgekit.contracts.plan import Plan
from edgekit.testing import check_engine

PLAN = "plan.json"
# folder → family, recipe; together every kernel of products, of windows and of recurrent layers
MODELS = {
    "llama-s4-g32": ("llama", "s4-g32"),
    "llama-s8": ("llama", "s8"),
    "gemma3-s4-g64": ("gemma3", "s4-g64"),
    "lfm2-s4-g32": ("lfm2", "s4-g32"),
}
EXACT_MODELS = ("llama-s4-g32", "llama-s8", "gemma3-s4-g64")  # without recurrent layers
SEQUENCES = 5  # random ones of each model
TOLERANCE = 0.03  # of the largest logit: int8 kernels round a token otherwise when it comes with others


def export_all(folder: Path) -> None:
    import family_models as models

    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, perhaps by another exporter
    for name, (family, recipe) in MODELS.items():
        with tempfile.TemporaryDirectory() as temporary:
            made = Path(temporary)
            models.write_model(made / "model", *models.EVERY[family])
            weights = models.weights_of(made / "model", recipe, made / "store")
            plan = models.plan_for(weights.model, weights.recipe, chunk_tokens=16)
            (folder / name).mkdir(parents=True)
            export(plan, weights, folder / name, models.quiet)
            (folder / name / PLAN).write_text(plan.model_dump_json())


def check(folder: Path, *names: str) -> None:
    """Every promise of an engine within rounding; in exact mode bit for bit, which only recurrent layers refuse."""
    for name in names or MODELS:
        files, begun = folder / name, time.monotonic()
        plan = Plan.model_validate_json((files / PLAN).read_text())
        check_engine(partial(OnnxEngine, plan, files), exact=False, tolerance=TOLERANCE, sequences=SEQUENCES)
        if inexact(plan) is None:
            check_engine(partial(OnnxEngine, plan, files, exact=True), exact=True, tolerance=0, sequences=SEQUENCES)
        assert (inexact(plan) is None) == (name in EXACT_MODELS)
        exact = "holds" if name in EXACT_MODELS else "refused"
        sys.stdout.write(f"  {name}: keeps its promises, exact mode {exact}, {time.monotonic() - begun:.0f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    {"export": export_all, "check": check}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
