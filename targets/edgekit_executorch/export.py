"""Writes an artifact's program. For equal plans and weights it is lowered once and then copied from a store."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgekit.common.content_store import ContentStore
from edgekit.common.files import home
from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.errors import DamagedArtifact, Unsupported, vendor_errors
from edgekit_executorch.layout import INT8_BITS, LAYOUT_VERSION, PROGRAM, Sizes, description, feature_layers
from edgekit_executorch.quiet import quiet_output
from edgekit_executorch.versions import require, versions

BACKENDS = ("xnnpack", "coreml", "vulkan")
_GRAPH = 2  # raised whenever an equal plan is lowered to another graph, so that a stored program is not taken for it


def export(plan: Plan, weights: NeutralWeights, out: Path, progress: Progress) -> None:
    """Write the program into the empty directory `out`. Raises `Unsupported` if the plan cannot be lowered."""
    require(to_export=True)

    def make(folder: Path) -> None:
        with vendor_errors("executorch"), quiet_output():
            lower(plan, weights, folder / PROGRAM, progress)

    def check(folder: Path) -> None:
        if not (folder / PROGRAM).is_file() or (folder / PROGRAM).stat().st_size == 0:
            raise DamagedArtifact(f"{folder}: holds no {PROGRAM}")

    def waiting(holder: str) -> None:
        progress(0, 1, f"{holder} is lowering the same program; waiting")

    stored, hold = ContentStore(home() / "programs").hold(content_key(plan, weights), make, check, waiting)
    shutil.copyfile(stored / PROGRAM, out / PROGRAM)
    hold.close()
    weights.release()
    progress(1, 1, "exported")


def content_key(plan: Plan, weights: NeutralWeights) -> str:
    """Return a hash of everything that the program depends on."""
    facts = {
        "layout": LAYOUT_VERSION,
        "graph": _GRAPH,
        "weights": weights.sha256,
        "model": plan.model.model_dump(mode="json"),
        "backend": plan.backend,
        "recipe": plan.recipe.model_dump(mode="json"),
        "sizes": Sizes.of(plan)._asdict(),
        "context": plan.context,
        "kv_bits": plan.storage.kv_bits,
        "exits": plan.exits,
        "features": feature_layers(plan),
        "tools": versions(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def lower(plan: Plan, weights: NeutralWeights, path: Path, progress: Progress) -> None:
    """Lower to `path`, without the store of programs."""
    with _rare_collections():
        _lower(plan, weights, path, progress)


def _lower(plan: Plan, weights: NeutralWeights, path: Path, progress: Progress) -> None:
    if plan.backend in ("coreml", "vulkan"):
        from edgekit_executorch.whole import lower_whole

        lower_whole(plan, weights, path, progress)
        return
    from edgekit_executorch.decoder import ExecutorchDecoder
    from edgekit_executorch.layer_tensors import has_windows
    from edgekit_executorch.lowering import entries, lower_xnnpack
    from edgekit_executorch.operators import register_for_tracing

    if plan.backend != "xnnpack":
        raise Unsupported(f"executorch: backend {plan.backend} is not known; choose one of {', '.join(BACKENDS)}")
    register_for_tracing()
    sizes = Sizes.of(plan)
    int8_kv = plan.storage.kv_bits == INT8_BITS
    decoder = ExecutorchDecoder(weights, slots=sizes.slots, context=plan.context, int8_kv=int8_kv)
    methods = entries(
        decoder, sizes, windowed=has_windows(plan.model, sizes.slots), exits=plan.exits, features=feature_layers(plan)
    )
    lower_xnnpack(methods, description(plan), path, progress)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the garbage collector rarely in this block.

    Passes create millions of long-lived objects; scanning them takes a tenth of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
