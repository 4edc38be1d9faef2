"""Neutral weights from a float model, made part by part and kept in the store.

The shards of an interrupted run are its checkpoint: the next run goes on after the last whole one, and the bytes are
the same. Without calibration text only blocks of rows are held; with it, one layer and the text's hidden states.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgekit.common.content_store import ContentStore
from edgekit.common.files import boot_id, file_sha256, free_bytes, write_file
from edgekit.common.footprint import return_unused
from edgekit.common.machine_facts import is_marked, mark
from edgekit.common.parsing import read_json
from edgekit.common.progress import Progress, no_progress
from edgekit.common.sealed_json import to_sealed_json
from edgekit.contracts.neutral import (
    MANIFEST,
    MANIFEST_VERSION,
    NeutralManifest,
    NeutralWeights,
    Statistics,
    WeightFile,
    open_held,
    weights_store,
)
from edgekit.contracts.plan import Method, source_notes
from edgekit.contracts.recipe import Recipe, bits_per_weight, budget_bytes, needs_text, weight_bytes
from edgekit.errors import InvalidInput, OutOfSpace, TargetMissing, Unsupported
from edgekit.formats.safetensors import INDEX
from edgekit.model.source import ModelSource, open_source, open_tensors
from edgekit.model.source_files import companions, copy_companions, source_hashes
from edgekit.model.spec import ModelSpec
from edgekit.plugins import SMOOTHING, load_own
from edgekit.quant import shards as parts
from edgekit.quant.calibration import Calibration, read_calibration
from edgekit.quant.compute import Compute, device_for, notes_of, on_device
from edgekit.quant.hf_config import neutral_config
from edgekit.quant.methods import QuantJob, QuantMethod, Rtn, find_method, is_calibrated, rescales
from edgekit.quant.own_integers import Kept, rounded_notes
from edgekit.quant.sensitivity import load_losses, predicted_losses, resolve_budget, save_losses

if TYPE_CHECKING:
    import torch

    from edgekit.model.source import SourceTensors

_LOSSES = ".predicted_losses.json"
_BUDGET_SEQUENCES, _BUDGET_LENGTH = 4, 512  # of the bundled text, for a budget without calibration text
_SMOOTHED = "channels of inputs were made alike (SmoothQuant), so adapters that were trained on others do not fit"
QUANTISER = 6  # raised when integers get better or worse, not for processors that round otherwise: these are as good


def neutral_weights(
    source: ModelSource | Path,
    recipe: Recipe,
    *,
    method: Method | None = None,
    calibration: Calibration | None = None,
    store: ContentStore | None = None,
    progress: Progress = no_progress,
    compute: Compute | torch.device | None = None,
) -> NeutralWeights:
    """Return the neutral weights of a model from the store; make them first if they are missing.

    The store does not drop them while they are open. Without `calibration` scales are searched on the weights alone
    (rtn); with it, gptq unless `method` says otherwise. `compute`: where to compute; None: on a GPU that torch finds,
    else on the processor.
    """
    if compute is not None:
        need_torch()
        device_for(compute)  # refuse it even where the store has the weights
    opened = source if isinstance(source, ModelSource) else open_source(source, need_weights=True)
    order = Order(opened, recipe, _method(recipe, method, calibration), calibration, progress)
    return _find_or_make(order, store or weights_store(), compute)


def _find_or_make(order: Order, store: ContentStore, compute: Compute | torch.device | None) -> NeutralWeights:
    model, recipe, method = order.model, order.recipe, order.method
    refuse_what_cannot_be(model, recipe)
    if model.encoder and (is_calibrated(method) or budget_bytes(recipe, model) is not None):
        raise Unsupported(
            f"{model.name} is an encoder, which is rounded to the nearest: leave --calibrate, --effort and --method "
            "away, and choose s8 or a float recipe"
        )
    if is_calibrated(method) and (reason := find_method(method).refusal(model)):
        raise Unsupported(f"{model.name} {reason}; choose --method gptq or rtn")
    with open_tensors(order.source.weights) as tensors:
        order = order._replace(hashes=source_hashes(order.source.folder, tensors.files.values()))
        computes = is_calibrated(method) or needs_text(recipe, model)
        if computes:
            need_torch()
        elif compute not in (None, "cpu"):
            raise InvalidInput(f"compute {compute}: rounding to the nearest is done by the processor; leave it out")

        def make(folder: Path) -> None:
            if computes:
                on_device(compute, lambda device: _quantise(order._replace(device=device), tensors, folder))
            else:
                _quantise(order, tensors, folder)

        def waiting(holder: str) -> None:
            order.progress(0, 1, f"neutral weights: {holder} is making the same weights; waiting")

        key = _key(order)
        return open_held(store, key, make, lambda place: _check(key, place), waiting)


def are_kept(
    source: ModelSource,
    recipe: Recipe,
    *,
    method: Method | None = None,
    calibration: Calibration | None = None,
    store: ContentStore | None = None,
) -> bool:
    """Return True if these weights need no quantising, because the store has them."""
    if not source.has_weights or recipe.is_native():
        return False
    order = Order(source, recipe, _method(recipe, method, calibration), calibration)
    with open_tensors(source.weights) as tensors:
        order = order._replace(hashes=source_hashes(source.folder, tensors.files.values()))
    return ((store or weights_store()).root / _key(order)).is_dir()


def need_torch() -> None:
    """Raise `TargetMissing` where torch is not installed."""
    if find_spec("torch") is None:
        raise TargetMissing(
            "calibrating weights needs torch, which rounding and running them does not: give --recipe s4-g32 or s8 "
            "with --effort quick, or pip install 'edgekit[quantize]' (on Linux without an NVIDIA card, torch's much "
            "smaller CPU build before that: pytorch.org/get-started shows the command), or make them on another "
            "machine and bring the artifact here"
        )


def refuse_what_cannot_be(model: ModelSpec, recipe: Recipe) -> None:
    """Raise `Unsupported` for models and recipes that have no neutral weights."""
    if model.exportable is not None:
        raise Unsupported(f"{model.name}: {model.exportable}")
    if recipe.is_native():
        raise Unsupported(f"recipe {recipe.name} is a vendor's own format; neutral weights are s4, s8 and float")


def _method(recipe: Recipe, method: Method | None, calibration: Calibration | None) -> Method:
    if recipe.keeps is not None:
        if method not in (None, "kept") or calibration is not None:
            raise InvalidInput(
                f"recipe {recipe.name} keeps the source's integers ({recipe.keeps}); leave out --method and "
                "--calibrate, or choose a recipe that rounds again"
            )
        return "kept"
    if recipe.is_exact():
        return "none"
    if method is not None and is_calibrated(method) and calibration is None:
        raise InvalidInput(f"{method} needs calibration text; give --calibrate FILE, or choose --method rtn")
    if method is not None and method != "none":
        return method
    return "rtn" if calibration is None else "gptq"


class Order(NamedTuple):
    """Weights to make: of which model, as what, by which method, on which calibration text."""

    source: ModelSource
    recipe: Recipe
    method: Method
    calibration: Calibration | None
    progress: Progress = no_progress
    hashes: Mapping[str, str] = {}  # of the source's files
    device: torch.device | None = None  # None: nothing is computed

    @property
    def model(self) -> ModelSpec:
        return self.source.spec


def _key(order: Order) -> str:
    """Return the key of the weights: a hash of everything that decides the integers."""
    described = {
        "quantiser": QUANTISER,
        "model": order.model.model_copy(update={"name": ""}).model_dump(mode="json"),
        "recipe": order.recipe.model_dump(mode="json"),
        "method": order.method,
        "source": order.hashes,
        "calibration": order.calibration.fact.model_dump(mode="json") if order.calibration else None,
        "tools": parts.tools(),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _quantise(order: Order, tensors: SourceTensors, folder: Path) -> None:
    """Fill `folder` after existing shards, the manifest last."""
    if not (folder / MANIFEST).exists():
        _make(order, tensors, folder)
    parts.remove_working_files(folder)


def _make(order: Order, tensors: SourceTensors, folder: Path) -> None:
    read = (
        parts.reader(tensors, order.model, order.device) if order.device else parts.array_reader(tensors, order.model)
    )
    if order.recipe.smooth:
        smoothed_reader = load_own(SMOOTHING)
        read = smoothed_reader(order.recipe, order.model, _text(order), read, folder, order.progress, order.device)
    recipe = _recipe_within_budget(order, read, folder)
    notes = _notes(order, recipe, tensors)
    chooser: QuantMethod = Kept(tensors, read, recipe) if order.method == "kept" else Rtn(read)
    if is_calibrated(order.method) and order.calibration and order.device:
        method = find_method(order.method)
        notes = (*notes, method.note) if method.note else notes
        chooser = method(QuantJob(order.model, recipe, order.calibration, read, order.device, order.progress))
    every_part = parts.parts_of(order.model)
    shards = [parts.shard_name(part.number, len(every_part)) for part in every_part]
    _need_room(order.model, recipe, folder)
    total = sum(tensor.size for part in every_part for tensor in part.tensors)
    done, loss = 0, ""
    last_layer = every_part[-2]
    for part, shard in zip(every_part, shards, strict=True):
        order.progress(done, total, f"neutral weights: {part.title}{loss}")
        if not parts.is_written(folder / shard):
            choice = chooser.choose(part)
            noted = parts.write_part(folder / shard, part, order.model, recipe, choice, tensors.release)
            loss = _loss(noted)
        if part.number < last_layer.number:
            chooser.advance(part, folder / shard)
        done += sum(tensor.size for tensor in part.tensors)
    order.progress(total, total, "neutral weights: sealing")
    _finish(order, recipe, folder, shards, notes)


def _need_room(model: ModelSpec, recipe: Recipe, folder: Path) -> None:
    """Raise `OutOfSpace` before the first part if the disk cannot hold the rest."""
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    needed, free = weight_bytes(model, recipe) - written, free_bytes(folder)
    if free < needed:
        raise OutOfSpace(str(folder), needed, free)


def _loss(noted: dict[str, Statistics]) -> str:
    """Describe the mean rounding error of the part just stored: of its outputs if measured, else of its weights."""
    if not noted:
        return ""
    outputs = [item.output_error for item in noted.values() if item.output_error is not None]
    errors = outputs or [item.weight_error for item in noted.values()]
    kind = "outputs" if outputs else "weights"
    return f" (rounding error of the last one: {sum(errors) / len(errors):.2%} of its {kind})"


def _recipe_within_budget(order: Order, read: parts.ReadRows, folder: Path) -> Recipe:
    """Return the recipe with its budget spent on the linears with the largest predicted losses, measured once."""
    budget = budget_bytes(order.recipe, order.model)
    if budget is None or budget < weight_bytes(order.model, order.recipe):  # nothing to spend
        return order.recipe
    path = folder / _LOSSES
    if not path.exists():
        losses = predicted_losses(
            order.recipe, order.model, _text(order), read, order.progress, order.device, by_gptq=order.method == "gptq"
        )
        save_losses(path, losses)
        return_unused()
    return resolve_budget(order.recipe, order.model, load_losses(path))


def _text(order: Order) -> Calibration:
    """Return the calibration text; for a budget without one, part of the bundled text."""
    return order.calibration or read_calibration(
        None, order.source.folder, vocabulary=order.model.vocab_size, sequences=_BUDGET_SEQUENCES, length=_BUDGET_LENGTH
    )


def _notes(order: Order, recipe: Recipe, tensors: SourceTensors) -> tuple[str, ...]:
    notes = (
        *source_notes(order.source.quantised_as, recipe),
        *_budget_notes(order, recipe),
        *(_SMOOTHED,) * recipe.smooth,
    )
    if recipe.keeps is None:
        return notes
    return (*notes, *rounded_notes(order.model, recipe, {name: e.dtype for name, e in tensors.entries.items()}))


def _budget_notes(order: Order, recipe: Recipe) -> tuple[str, ...]:
    budget = budget_bytes(order.recipe, order.model)
    if budget is None:
        return ()
    text = "the calibration text" if order.calibration else "the text that comes with edgekit"
    promoted = len(recipe.rules) - len(order.recipe.rules)
    if not promoted and weight_bytes(order.model, recipe) > budget:
        return (
            f"the rules alone take {bits_per_weight(order.model, recipe):.2f} bits per weight; nothing was promoted",
        )
    return (f"{promoted} matrices were promoted to s8 by their sensitivity on {text}",)


def _expert_notes(order: Order, statistics: dict[str, Statistics]) -> tuple[str, ...]:
    """Say how many matrices of experts gptq left to rounding to nearest."""
    experts = {tensor.module for tensor in order.model.tensors() if tensor.role == "expert"} & set(statistics)
    nearest = sum(statistics[module].output_error is None for module in experts)
    if order.method != "gptq" or not nearest:
        return ()
    return (
        f"{nearest:,} of {len(experts):,} matrices of experts were rounded to nearest, because fewer tokens of the "
        "calibration text reach them than they have inputs",
    )


def _finish(order: Order, recipe: Recipe, folder: Path, shards: list[str], notes: tuple[str, ...]) -> None:
    """Write all files other than the shards, the manifest last."""
    parts.write_index(folder, shards)
    config = neutral_config(read_json(order.source.folder / "config.json"), order.model, recipe)
    write_file(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())
    copy_companions(order.source.folder, folder)
    names = [*shards, INDEX, "config.json", *(path.name for path in companions(order.source.folder))]
    statistics: dict[str, Statistics] = {}
    for shard in shards:
        statistics |= parts.read_statistics(folder / shard)
    manifest = NeutralManifest(
        version=2 if recipe.keeps is None else MANIFEST_VERSION if recipe.has_minima else 3,
        model=order.model,
        recipe=recipe,
        method=order.method,
        rescales=rescales(order.method),
        source_files=dict(order.hashes),
        calibration=order.calibration.fact if order.calibration else None,
        tools=parts.tools(),
        files={
            name: WeightFile(bytes=(folder / name).stat().st_size, sha256=file_sha256(folder / name)) for name in names
        },
        statistics=statistics,
        notes=(*notes, *_expert_notes(order, statistics), *(notes_of(order.device) if order.device else ())),
    )
    write_file(folder / MANIFEST, to_sealed_json(manifest))


def _check(key: str, folder: Path) -> None:
    """Check sizes always, hashes the first time since the machine was started."""
    weights = NeutralWeights.open(folder)
    checked = {"boot": boot_id(), "files": [[*_stamp(folder / name)] for name in sorted(weights.manifest.files)]}
    if not is_marked(key, "verified", checked):
        weights.verify()
        mark(key, "verified", checked)


def _stamp(path: Path) -> tuple[int, int, int]:
    info = path.stat()
    return info.st_ino, info.st_size, info.st_mtime_ns
