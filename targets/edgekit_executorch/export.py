"""Writes an artifact's program: refuses what cannot be honoured, lowers once, finds it again by content."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from edgekit.errors import DamagedArtifact, Unsupported, vendor_errors
from edgekit.files import home
from edgekit.interfaces import Progress
from edgekit.plan import Plan
from edgekit.store import Store
from edgekit.weights.neutral import NeutralWeights
from edgekit_executorch.hushed import hushed
from edgekit_executorch.layout import LAYOUT_VERSION, NARROW_BITS, PROGRAM, Sizes, description
from edgekit_executorch.refusals import refuse_plan
from edgekit_executorch.versions import require_pair, versions

BACKENDS = ("xnnpack", "coreml", "vulkan")


def export(plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
    """Write the program into the empty directory `out`; the same plan and weights are lowered only once."""
    refuse_plan(plan)
    require_pair()

    def make(folder: Path) -> None:
        with vendor_errors("executorch"), hushed():
            lower(plan, weights, folder / PROGRAM, progress)

    def check(folder: Path) -> None:
        if not (folder / PROGRAM).is_file() or (folder / PROGRAM).stat().st_size == 0:
            raise DamagedArtifact(f"{folder}: holds no {PROGRAM}")

    def waiting(holder: str) -> None:
        progress(0, 1, f"{holder} is lowering the same program; waiting")

    made = Store(home() / "programs").get(content_key(plan, weights), make, check, waiting)
    shutil.copyfile(made / PROGRAM, out / PROGRAM)
    weights.release()
    progress(1, 1, "exported")


def content_key(plan: Plan, weights: NeutralWeights) -> str:
    """The same for plans and weights that give the same program."""
    facts = {
        "layout": LAYOUT_VERSION,
        "weights": weights.sha256,
        "model": plan.model.model_dump(mode="json"),
        "backend": plan.backend,
        "recipe": plan.recipe.model_dump(mode="json"),
        "sizes": Sizes.of(plan)._asdict(),
        "context": plan.context,
        "kv_bits": plan.storage.kv_bits,
        "exits": plan.exits,
        "tools": versions(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def lower(plan: Plan, weights: NeutralWeights, path: Path, progress: Progress) -> None:
    """Lower, whatever was made before."""
    if plan.backend == "coreml":
        from edgekit_executorch.coreml import lower_coreml

        lower_coreml(plan, weights, path, progress)
        return
    if plan.backend == "vulkan":
        from edgekit_executorch.vulkan import lower_vulkan

        lower_vulkan(plan, weights, path, progress)
        return
    from edgekit_executorch.decoder import Decoder
    from edgekit_executorch.lowering import entries, lower_xnnpack
    from edgekit_executorch.operators import register_for_tracing
    from edgekit_executorch.parts import has_windows

    if plan.backend != "xnnpack":
        raise Unsupported(f"executorch: backend {plan.backend} is not known; choose one of {', '.join(BACKENDS)}")
    register_for_tracing()
    sizes = Sizes.of(plan)
    is_narrow = plan.storage.kv_bits == NARROW_BITS
    decoder = Decoder(weights, slots=sizes.slots, positions=sizes.positions, context=plan.context, narrow=is_narrow)
    methods = entries(decoder, sizes, windowed=has_windows(plan.model, sizes.slots), exits=plan.exits)
    lower_xnnpack(methods, description(plan), path, progress)
