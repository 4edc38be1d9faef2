"""The trip from a plan to a sealed artifact: neutral weights, the target's files, a self-check, one rename.

Knows no target by name. Whatever is interrupted leaves either no artifact or a whole one; neutral
weights go on from the layer where they stood.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit import plugins
from edgekit.artifact import Artifact, seal, staging_for
from edgekit.errors import InvalidInput, TargetFailed, TargetMissing, Unsupported
from edgekit.installed import versions_of
from edgekit.interfaces import Chunk, Engine, Progress, Target
from edgekit.plan import Plan
from edgekit.planning import with_what_was_done
from edgekit.recipe import Format, Kind, Recipe, Rule
from edgekit.source import open_source
from edgekit.store import Store
from edgekit.weights.neutral import NeutralWeights
from edgekit.weights.quantise import neutral_weights, quiet
from edgekit.weights.safetensors import TensorFolder
from edgekit.weights.sources import companions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.weights.calibration import Calibration
    from edgekit.weights.neutral import Method

CHECKED_TOKENS = 16
# Rounding activations to int8 moves logits by a few percent; wrong weights, ropes or names move them by far more.
WORST_ERROR = 0.10
# A vendor's own format is compared with the float model, from which it was quantised: its loss is part of the distance.
WORST_NATIVE_ERROR = 0.75
_TOOLS = (
    "edgekit",
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnx-ir",
    "mlx",
    "mlx-lm",
    "executorch",
    "torch",
    "torchao",
)


def export(
    plan: Plan,
    out: str | Path,
    *,
    calibration: Calibration | None = None,
    method: Method | None = None,
    store: Store | None = None,
    progress: Progress = quiet,
) -> Artifact:
    """Build what `plan` says and seal it at `out`, which must not exist."""
    final = Path(out)
    if plan.model.exportable is not None:
        raise Unsupported(f"{plan.model_source}: {plan.model.exportable}")
    target = plugins.load_target(plan.target)
    staging = staging_for(final, plan.estimate.disk_bytes)
    try:
        weights = _weights(plan, calibration, method, store, progress)
        if not plan.recipe.is_native():
            plan = plan.model_copy(update={"recipe": weights.recipe})  # a budget of bits is now rules for each module
            plan = with_what_was_done(plan, weights.manifest)
        target.export(plan, weights, staging, _named(progress, f"{plan.target} {plan.backend}"))
        for path in companions(weights.folder):
            if not (staging / path.name).exists():
                shutil.copyfile(path, staging / path.name)
        checked = self_check(target, plan, weights, staging, progress)
        return seal(staging, final, plan, weights_sha256=weights.sha256, tools=tools(), self_check=checked)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def export_all(
    plans: Sequence[Plan],
    out: str | Path,
    *,
    calibration: Calibration | None = None,
    method: Method | None = None,
    store: Store | None = None,
    progress: Progress = quiet,
) -> list[Artifact]:
    """One artifact at `out`, or one a device in folders below it; plans of one recipe share one quantisation."""
    places = [Path(out)] if len(plans) == 1 else [Path(out) / plan.device for plan in plans]
    for place in places:
        if place.exists():
            raise InvalidInput(f"{place}: exists already; an artifact is never overwritten: choose another path")
    return [
        export(plan, place, calibration=calibration, method=method, store=store, progress=progress)
        for plan, place in zip(plans, places, strict=True)
    ]


def self_check(target: Target, plan: Plan, weights: NeutralWeights, files: Path, progress: Progress) -> str:
    """What the freshly written files compute, against the reference on the weights they were packed from."""
    missing = target.missing()
    if missing:
        return _packed_only(target, plan, weights, files, missing)
    progress(0, 1, "self-check")
    try:
        engine = target.open(plan, files)
    except (TargetMissing, Unsupported) as refused:
        return _packed_only(target, plan, weights, files, str(refused))
    try:
        found = _engine_logits(engine, plan)
    finally:
        engine.close()
    expected = _reference_logits(weights, plan)
    if expected is None:
        return "ran; not compared, because the reference needs torch: pip install 'edgekit[quantize]'"
    error = float(abs(found - expected).max() / max(abs(expected).max(), 1e-9))
    same = float((found.argmax(axis=-1) == expected.argmax(axis=-1)).mean())
    allowed, reference = WORST_ERROR, "the reference"
    if plan.recipe.is_native():
        allowed, reference = WORST_NATIVE_ERROR, "the float model"
    if not error <= allowed:
        raise TargetFailed(
            f"{plan.target}: the self-check failed: logits differ from {reference} by {error:.1%} of their largest"
            f" (at most {allowed:.0%} is allowed); nothing was written. This is a bug: please report the plan"
        )
    progress(1, 1, "self-check")
    return f"logits within {error:.2%} of {reference}, {same:.0%} of top tokens equal, on {len(found)} tokens"


def _packed_only(target: Target, plan: Plan, weights: NeutralWeights, files: Path, reason: str) -> str:
    """Where the engine cannot run here: what was packed is read back, integer × scale, bit for bit."""
    unpack = getattr(target, "weights", None)
    if unpack is None or plan.recipe.is_native():
        return f"packed-only: {reason}"
    quantised = {module for module in weights.modules() if not weights.format_of(module).is_float}
    count = 0
    try:
        for name, values in unpack(plan, files):
            module = name.removesuffix(".weight")
            if module == name or module not in quantised:
                continue
            count += 1
            if not (values == weights.tensor(name)).all():
                raise TargetFailed(
                    f"{plan.target}: {name} was packed wrongly; nothing was written."
                    " This is a bug: please report the plan"
                )
    except (TargetMissing, Unsupported) as refused:
        return f"packed-only: {reason}; not read back: {refused}"
    weights.release()
    return f"packed-only: {count} quantised matrices read back bit for bit; {reason}"


def checked_tokens(plan: Plan) -> list[int]:
    """The tokens of the self-check: spread over the vocabulary, the same for every target."""
    count = min(CHECKED_TOKENS, plan.storage.capacity_tokens)
    return [(7 + index * 2_654_435_761) % plan.model.vocab_size for index in range(count)]


def tools() -> dict[str, str]:
    """The versions of everything that may have had a hand in an artifact."""
    return versions_of(_TOOLS)


def _weights(
    plan: Plan, calibration: Calibration | None, method: Method | None, store: Store | None, progress: Progress
) -> NeutralWeights:
    folder = Path(plan.model_source)
    if (folder / "edgekit.json").is_file():
        weights = NeutralWeights.open(folder)
        if weights.recipe != plan.recipe:
            raise InvalidInput(
                f"{folder}: holds neutral weights of recipe {weights.recipe.name}, and the plan asks for"
                f" {plan.recipe.name}; leave --recipe away, or give the float model"
            )
        if calibration is not None or method is not None:
            raise InvalidInput(f"{folder}: holds integers already; --calibrate and --method need the float model")
        return weights
    source = open_source(plan.model_source, need_weights=True)
    if source.config_sha256 != plan.model_sha256:
        raise InvalidInput(f"{plan.model_source}: its config.json is not the one that was planned; plan again")
    if plan.recipe.is_native():
        if calibration is not None or method is not None:
            raise InvalidInput(
                f"recipe {plan.recipe.name} is a vendor's own format; it takes no --calibrate or --method"
            )
        recipe = _as_it_is(source.folder)
    else:
        recipe = plan.recipe
    return neutral_weights(source, recipe, method=method, calibration=calibration, store=store, progress=progress)


def _as_it_is(folder: Path) -> Recipe:
    """Float weights without any loss: in the type that all of them have, else in float32."""
    kinds: dict[str, Kind] = {"BF16": "bfloat16", "F16": "float16"}
    with TensorFolder.open(folder) as tensors:
        found = {entry.dtype for entry in tensors.entries.values()}
    kind = kinds.get(found.pop(), "float32") if len(found) == 1 else "float32"
    return Recipe(name=kind, rules=(Rule(pattern="*", format=Format(kind=kind)),), float_format=Format(kind=kind))


def _named(progress: Progress, task: str) -> Progress:
    def tell(done: float, total: float, what: str) -> None:
        progress(done, total, f"{task}: {what}")

    return tell


def _engine_logits(engine: Engine, plan: Plan) -> NDArray[np.float32]:
    import numpy as np

    tokens = checked_tokens(plan)
    # The widest cache: what is checked are the weights, not what a narrow cache loses.
    state = engine.start(plan.storage.model_copy(update={"kv_bits": engine.abilities.kv_bits[0]}))
    try:
        return np.array(engine.forward([Chunk(state, tokens, len(tokens))])[0], dtype=np.float32)
    finally:
        state.close()


def _reference_logits(weights: NeutralWeights, plan: Plan) -> NDArray[np.float32] | None:
    try:
        import torch
    except ImportError:
        return None
    from edgekit.weights.decoder import logits

    found = logits(
        plan.model,
        lambda name: torch.from_numpy(weights.tensor(name)),
        checked_tokens(plan),
        context_tokens=plan.context,
        get_rows=lambda name, rows: torch.from_numpy(weights.dequantised(name.removesuffix(".weight"), rows)),
    )
    weights.release()
    values: NDArray[np.float32] = found.numpy()
    return values
