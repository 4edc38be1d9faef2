"""Neutral weights from a float model, made once and found again: the walk through its parts.

The shards of an interrupted run are its checkpoint: the next run goes on after the last whole one, and the bytes come
out the same. Without calibration text only blocks of rows are held; with it, one layer and the text's hidden states.
"""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from edgekit.errors import InvalidInput, OutOfSpace, TargetMissing, Unsupported
from edgekit.facts import read_fact, write_fact
from edgekit.files import boot_id, file_sha256, free_bytes, write_file
from edgekit.interfaces import Progress
from edgekit.model import ModelSpec
from edgekit.reading import read_json
from edgekit.recipe import Recipe, bits_per_weight, weight_bytes
from edgekit.source import ModelSource, open_source
from edgekit.store import Store
from edgekit.weights import parts
from edgekit.weights.calibration import Calibration, read_calibration
from edgekit.weights.choosing import chooser_for
from edgekit.weights.config import neutral_config
from edgekit.weights.mixed import budget_bytes, resolve_budget
from edgekit.weights.neutral import (
    MANIFEST,
    CalibrationFact,
    Method,
    NeutralManifest,
    NeutralWeights,
    Statistics,
    WeightFile,
)
from edgekit.weights.safetensors import INDEX, TensorFolder
from edgekit.weights.sources import companions, copy_companions, source_hashes

_SETTLED = ".recipe.json"
QUANTISER = 2  # raised whenever the same input would give other integers


def quiet(done: float, total: float, what: str) -> None:
    """A Progress that tells nobody."""


def neutral_weights(
    source: ModelSource | Path,
    recipe: Recipe,
    *,
    model: ModelSpec | None = None,
    method: Method | None = None,
    calibration: Calibration | None = None,
    store: Store | None = None,
    progress: Progress = quiet,
) -> NeutralWeights:
    """The neutral weights of a model, opened or in a folder: found in the store, or made there now.

    Without `calibration` scales are searched on the weights alone (rtn); with it, gptq unless `method` says otherwise.
    """
    if model is None or isinstance(source, ModelSource):
        opened = source if isinstance(source, ModelSource) else open_source(source, need_weights=True)
        folder, model = opened.folder, model or opened.spec
    else:
        folder = source
    return _find_or_make(folder, model, recipe, method, calibration, store or Store(), progress)


def _find_or_make(
    source: Path,
    model: ModelSpec,
    recipe: Recipe,
    method: Method | None,
    calibration: Calibration | None,
    store: Store,
    progress: Progress,
) -> NeutralWeights:
    method = _method(recipe, method, calibration)
    need_torch()
    refuse_what_cannot_be(model, recipe)
    with TensorFolder.open(source) as tensors:
        hashes = source_hashes(source, tensors)
        facts = calibration.fact if calibration else None
        key = _key(model, recipe, method, hashes, facts)

        def make(folder: Path) -> None:
            _quantise(Order(source, model, recipe, method, hashes, calibration, progress), tensors, folder)

        def waiting(holder: str) -> None:
            progress(0, 1, f"neutral weights: {holder} is making the same weights; waiting")

        folder = store.get(key, make, check=lambda place: _check(key, place), waiting=waiting)
    return NeutralWeights.open(folder)


def need_torch() -> None:
    """Refuse, with the cure, where it is not installed."""
    if find_spec("torch") is None:
        raise TargetMissing(
            "making weights needs torch, which running them does not; pip install 'edgekit[quantize]', or make them on "
            "another machine and bring the artifact here"
        )


def refuse_what_cannot_be(model: ModelSpec, recipe: Recipe) -> None:
    """Models and recipes that have no neutral weights are refused by name."""
    if model.exportable is not None:
        raise Unsupported(f"{model.name}: {model.exportable}")
    if recipe.is_native():
        raise Unsupported(f"recipe {recipe.name} is a vendor's own format; neutral weights are s4, s8 and float")


def _method(recipe: Recipe, method: Method | None, calibration: Calibration | None) -> Method:
    if recipe.is_exact():
        return "none"
    if method in ("gptq", "awq") and calibration is None:
        raise InvalidInput(f"{method} needs calibration text; give --calibrate FILE, or choose --method rtn")
    if method is not None and method != "none":
        return method
    return "rtn" if calibration is None else "gptq"


def _key(
    model: ModelSpec, recipe: Recipe, method: Method, hashes: dict[str, str], calibration: CalibrationFact | None
) -> str:
    described = {
        "quantiser": QUANTISER,
        "model": model.model_copy(update={"name": ""}).model_dump(mode="json"),
        "recipe": recipe.model_dump(mode="json"),
        "method": method,
        "source": hashes,
        "calibration": calibration.model_dump(mode="json") if calibration else None,
        "tools": parts.tools(),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


class Order(NamedTuple):
    """What is to be made of what."""

    source: Path
    model: ModelSpec
    recipe: Recipe
    method: Method
    hashes: dict[str, str]
    calibration: Calibration | None
    progress: Progress


def _quantise(order: Order, tensors: TensorFolder, folder: Path) -> None:
    """Fill `folder`, going on from the shards that stand there already; the manifest is written when all else is."""
    if not (folder / MANIFEST).exists():
        _make(order, tensors, folder)
    for shard in folder.glob("*.safetensors"):
        parts.forget_statistics(shard)
    (folder / _SETTLED).unlink(missing_ok=True)


def _make(order: Order, tensors: TensorFolder, folder: Path) -> None:
    read = parts.reader(tensors, order.model)
    recipe = _resolved(order, read, folder)
    chooser = chooser_for(order.method, order.model, recipe, order.calibration, read)
    found = parts.parts_of(order.model)
    shards = [parts.shard_name(part.number, len(found)) for part in found]
    _need_room(order.model, recipe, folder)
    total = sum(tensor.size for part in found for tensor in part.tensors)
    done, loss = 0, ""
    for part, shard in zip(found, shards, strict=True):
        order.progress(done, total, f"neutral weights: {part.title}{loss}")
        if not (folder / shard).exists():
            choice = chooser.choose(part)
            noted = parts.write_part(folder / shard, part, order.model, recipe, choice, tensors.release)
            loss = _loss(noted)
        if part is not found[-1]:
            chooser.advance(part, folder / shard)
        done += sum(tensor.size for tensor in part.tensors)
    order.progress(total, total, "neutral weights: sealing")
    _finish(order, recipe, folder, shards)


def _need_room(model: ModelSpec, recipe: Recipe, folder: Path) -> None:
    """A disk that cannot hold what is still to be written is refused before the first part."""
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    needed, free = weight_bytes(model, recipe) - written, free_bytes(folder)
    if free < needed:
        raise OutOfSpace(str(folder), needed, free)


def _loss(noted: dict[str, Statistics]) -> str:
    """The mean error of what was just stored, of its outputs where they were measured."""
    if not noted:
        return ""
    outputs = [item.output_error for item in noted.values() if item.output_error is not None]
    errors = outputs or [item.weight_error for item in noted.values()]
    return f" (the one before lost {sum(errors) / len(errors):.2%} of its {'outputs' if outputs else 'weights'})"


def _resolved(order: Order, read: parts.Read, folder: Path) -> Recipe:
    """The recipe with every linear's format settled; a budget is settled once, before the first part."""
    if order.recipe.bits_per_weight is None:
        return order.recipe
    place = folder / _SETTLED
    if place.exists():
        return Recipe.model_validate_json(place.read_bytes())
    text = order.calibration or default_calibration(order.source, order.model)
    recipe = resolve_budget(order.recipe, order.model, text, read, order.progress)
    write_file(place, recipe.model_dump_json().encode())
    return recipe


def default_calibration(source: Path, model: ModelSpec) -> Calibration:
    """The text that comes with edgekit, for what has to be measured where no text was given."""
    return read_calibration(None, source, vocabulary=model.vocab_size)


def _notes(order: Order, recipe: Recipe) -> tuple[str, ...]:
    if order.recipe.bits_per_weight is None:
        return ()
    text = "the calibration text" if order.calibration else "the text that comes with edgekit"
    climbed = len(recipe.rules) - len(order.recipe.rules)
    if not climbed and weight_bytes(order.model, recipe) > budget_bytes(order.recipe, order.model):
        return (f"the rules alone take {bits_per_weight(order.model, recipe):.2f} bits per weight; nothing climbed",)
    return (f"{climbed} linears climbed to s8 by their sensitivity on {text}",)


def _finish(order: Order, recipe: Recipe, folder: Path, shards: list[str]) -> None:
    """Everything that stands beside the shards, the manifest last."""
    parts.write_index(folder, shards)
    config = neutral_config(read_json(order.source / "config.json"), order.model, recipe)
    write_file(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())
    copy_companions(order.source, folder)
    names = [*shards, INDEX, "config.json", *(path.name for path in companions(order.source))]
    statistics: dict[str, Statistics] = {}
    for shard in shards:
        statistics |= parts.read_statistics(folder / shard)
    manifest = NeutralManifest(
        model=order.model,
        recipe=recipe,
        method=order.method,
        source_files=order.hashes,
        calibration=order.calibration.fact if order.calibration else None,
        tools=parts.tools(),
        files={
            name: WeightFile(bytes=(folder / name).stat().st_size, sha256=file_sha256(folder / name)) for name in names
        },
        statistics=statistics,
        notes=_notes(order, recipe),
    )
    write_file(folder / MANIFEST, (manifest.model_dump_json(indent=1) + "\n").encode())


def _check(key: str, folder: Path) -> None:
    """Whole by size always, by hash the first time since the machine was started."""
    weights = NeutralWeights.open(folder)
    mark = {"boot": boot_id(), "files": [[*_stamp(folder / name)] for name in sorted(weights.manifest.files)]}
    if read_fact(key, "verified") != mark:
        weights.verify()
        write_fact(key, "verified", mark)


def _stamp(path: Path) -> tuple[int, int, int]:
    info = path.stat()
    return info.st_ino, info.st_size, info.st_mtime_ns
