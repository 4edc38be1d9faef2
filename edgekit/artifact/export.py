"""From a plan to a sealed artifact: neutral weights, the target's files, a self-check, one rename.

An interrupted export leaves no artifact; its neutral weights resume at the part where they stopped.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from edgekit import plugins
from edgekit.artifact.artifact import Artifact, MadeOf, seal
from edgekit.artifact.bom import BOM_FILE, CARD_FILE, bill_of_materials, model_card
from edgekit.artifact.export_memory import check_memory
from edgekit.artifact.origin import origin_of
from edgekit.artifact.sealed_adapters import check_adapters, check_inputs, seal_adapters
from edgekit.artifact.sealed_head import seal_head
from edgekit.artifact.self_check import self_check
from edgekit.artifact.tokenizer_memory import with_tokenizer
from edgekit.common.files import check_output, free_bytes
from edgekit.common.footprint import return_unused
from edgekit.common.machine_facts import write_fact
from edgekit.common.options import Option
from edgekit.common.packages import RUNTIMES, versions_of
from edgekit.common.progress import Progress
from edgekit.common.staging import staging_for
from edgekit.contracts.manifest import Manifest
from edgekit.contracts.neutral import NeutralWeights, is_neutral
from edgekit.contracts.plan import MAX_KV_KL, Plan, Quantisation
from edgekit.contracts.recipe import Format, NumberFormat, Recipe, Rule, needs_text
from edgekit.errors import InvalidInput, OutOfSpace, TargetMissing, Unsupported
from edgekit.model.source import BUNDLED, ModelSource, open_source, open_tensors
from edgekit.model.source_files import companions
from edgekit.planner.memory import with_facts
from edgekit.quant.methods import rescales
from edgekit.quant.options import QuantOptions
from edgekit.quant.pipeline import need_torch, neutral_weights

if TYPE_CHECKING:
    from edgekit.quant.calibration import Calibration


def _folders(value: object) -> object:
    """Turn the texts NAME=PATH of the command line, or folders by name, into paths by name."""
    if isinstance(value, tuple):
        named = {name: path for name, _, path in (each.partition("=") for each in value)}
        if len(named) < len(value) or not all(name and path for name, path in named.items()):
            raise ValueError("give each as NAME=PATH, with different NAMEs")
        value = named
    return {name: Path(folder) for name, folder in value.items()} if isinstance(value, Mapping) else value


class ExportOptions(QuantOptions):
    """How an artifact is built: how its integers are chosen, and what is added to it."""

    adapters: Annotated[Mapping[str, Path], BeforeValidator(_folders), Option(name="adapter", metavar="NAME=PATH")] = (
        Field(
            default_factory=dict,
            description="A LoRA adapter (a PEFT folder) to seal with the model (run --adapter NAME); needs"
            " --adapter-rank.",
        )
    )
    with_bom: bool = Field(
        default=False, description="Add a bill of materials (CycloneDX) and a model card to the artifact."
    )
    prepare: bool = Field(
        default=False,
        description="Open the artifact once, so that no later opening on this machine has to pack weights.",
    )


def check_place(out: str | Path) -> None:
    """Raise `InvalidInput` if an artifact cannot be written at `out`."""
    final = Path(out)
    if final.exists() or final.is_symlink():
        raise InvalidInput(f"{final}: exists already; an artifact is never overwritten: choose another path")
    check_output(final)


def check_export(plan: Plan, out: str | Path, source: ModelSource) -> None:
    """Check the model, packages, disk space and `out` before any work.

    Raises `Unsupported`, `TargetMissing`, `OutOfSpace` or `InvalidInput`.
    """
    final = Path(out)
    if plan.model.exportable is not None:
        raise Unsupported(f"{plan.model_source}: {plan.model.exportable}")
    check_place(final)
    target = plugins.load_target(plan.target)
    target.check(plan)
    missing = target.missing_to_export()
    if missing is not None:
        raise TargetMissing(f"{plan.target}: {missing}")
    if not is_neutral(source.folder) and needs_text(plan.recipe, plan.model):
        need_torch()
    free, needed = free_bytes(final), plan.estimate.file_bytes
    if free < needed:
        raise OutOfSpace(str(final), needed, free)


def places_for(plans: Sequence[Plan], out: str | Path) -> list[Path]:
    """Return `out` for one plan; for several, a folder below it for each device."""
    return [Path(out)] if len(plans) == 1 else [Path(out) / plan.device for plan in plans]


def export(
    plan: Plan,
    out: str | Path,
    options: ExportOptions | None = None,
    *,
    source: ModelSource | None = None,
    calibration: Calibration | None = None,
) -> Artifact:
    """Build the artifact of `plan` and seal it at `out`, which must not exist.

    Args:
        source: the planned model, if it is open already; None opens `plan.model_source`.
        calibration: the text of `options`, read; None rounds to nearest.
    """
    options = options or ExportOptions()
    method, progress = options.method, options.report.progress
    source = source or open_source(plan.model_source)
    check_export(plan, out, source)
    check_adapters(plan, options.adapters)
    asked = Quantisation(method=method, rescales=rescales(method)) if method else plan.quantisation
    check_inputs(plan.model_copy(update={"quantisation": asked}))
    final = Path(out)
    target = plugins.load_target(plan.target)
    check_memory(plan, target, calibration.fact.tokens if calibration is not None else 0)
    staging = staging_for(final, plan.estimate.file_bytes)
    try:
        weights = _weights(plan, source, calibration, options)
        if not plan.recipe.is_native():
            # Where modules were promoted, the weights' recipe has one rule for each.
            # They may take other memory than planned.
            plan = with_facts(plan, target.memory, plan.memory, weights.recipe)
            plan = plan.model_copy(update={"quantisation": weights.manifest.quantisation})
            check_inputs(plan)
        plan = seal_head(plan, weights, staging)
        target.export(plan, weights, staging, _prefixed(progress, f"{plan.target} {plan.backend}"))
        return_unused()
        for path in companions(weights.folder):
            if not (staging / path.name).exists():
                shutil.copyfile(path, staging / path.name)
        seal_adapters(options.adapters, staging)
        plan = with_tokenizer(plan, staging, target.memory)
        checked = self_check(target, plan, weights, staging, progress)
        costly = tuple((bits, round(kl, 4)) for bits, kl in checked.kv_costs.items() if kl > MAX_KV_KL)
        plan = plan.model_copy(update={"costly_kv": costly})
        if plan.storage.kv_bits in dict(costly):
            options.report.warn(plan.kv_note(plan.storage.kv_bits))
        made = seal(
            staging,
            final,
            _without_paths(plan),
            weights_sha256=weights.sha256,
            tools=versions_of(RUNTIMES),
            self_check=checked.summary,
            origin=origin_of(source, weights),
            describe=_described if options.with_bom else lambda manifest: {},
        )
        if made.plan.model_source != plan.model_source:
            write_fact(made.sha256, "made-of", MadeOf(path=str(Path(plan.model_source).resolve())))
        return made
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _without_paths(plan: Plan) -> Plan:
    """Return the plan as it is sealed: nothing of this machine, and what lies on it is called by its name alone."""
    given = {field: getattr(plan, field) for field in ("model_source", "draft", "drafter_source")}
    here = {field: Path(path) for field, path in given.items() if path and path not in BUNDLED and Path(path).exists()}
    return plan.model_copy(update={"export_bytes": 0, **{field: path.resolve().name for field, path in here.items()}})


def _described(manifest: Manifest) -> dict[str, bytes]:
    return {BOM_FILE: bill_of_materials(manifest), CARD_FILE: model_card(manifest)}


def _weights(
    plan: Plan, source: ModelSource, calibration: Calibration | None, options: ExportOptions
) -> NeutralWeights:
    if is_neutral(source.folder):
        weights = NeutralWeights.open(source.folder)
        if weights.recipe != plan.recipe:
            raise InvalidInput(
                f"{source.given}: holds neutral weights of recipe {weights.recipe.name}, and the plan asks for"
                f" {plan.recipe.name}; leave out --recipe, or give the float model"
            )
        if calibration is not None or options.method is not None:
            raise InvalidInput(f"{source.given}: holds integers already; --calibrate and --method need the float model")
        return weights
    if source.config_sha256 != plan.model_sha256:
        raise InvalidInput(f"{source.given}: its config.json is not the one that was planned; plan again")
    source = source.with_weights()
    if plan.recipe.is_native():
        if calibration is not None or options.method is not None:
            raise InvalidInput(
                f"recipe {plan.recipe.name} is a vendor's own format; it takes no --calibrate or --method"
            )
        recipe = _float_recipe(source.weights)
    else:
        recipe = plan.recipe
    return neutral_weights(
        source,
        recipe,
        method=options.method,
        calibration=calibration,
        store=options.weights,
        progress=options.report.progress,
        compute=options.compute,
    )


def _float_recipe(weights: Path) -> Recipe:
    """Return the recipe that stores float weights without loss: in their common type, else in float32."""
    kinds: dict[str, NumberFormat] = {"BF16": "bfloat16", "F16": "float16"}
    with open_tensors(weights) as tensors:
        types = {entry.dtype for entry in tensors.entries.values()}
    if "BF16" in types:
        types.discard("MXFP4")  # bfloat16 holds its values
    kind = kinds.get(types.pop(), "float32") if len(types) == 1 else "float32"
    return Recipe(name=kind, rules=(Rule(pattern="*", format=Format(kind=kind)),), float_format=Format(kind=kind))


def _prefixed(progress: Progress, task: str) -> Progress:
    def report(done: float, total: float, what: str) -> None:
        progress(done, total, f"{task}: {what}")

    return report
