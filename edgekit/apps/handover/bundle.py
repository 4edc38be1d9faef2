"""Writes the hand-over folder: weights, the server's files, a README, a smoke test and the plan."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgekit import ModelSource, NeutralWeights, QuantizeOptions, Recipe, open_source, quantize, write_head
from edgekit.apps.handover import smoke_test
from edgekit.apps.handover.make import recipe_for
from edgekit.apps.handover.reference import reference_answers
from edgekit.apps.handover.server_files import adapter_names, readme, server_files
from edgekit.apps.handover.server_plan import ServerPlan
from edgekit.common.files import copy_file, sync_folder, write_file
from edgekit.common.staging import refuse_existing, staging_for
from edgekit.contracts.neutral import is_neutral
from edgekit.contracts.recipe import weight_bytes
from edgekit.errors import InvalidInput, Unsupported


def check_bundle(plan: ServerPlan, source: ModelSource, output: Path) -> dict[str, str]:
    """Return the text files of the bundle. Raises before any work if the bundle cannot be written."""
    refuse_existing(output)
    if source.spec.exportable and not is_neutral(source.folder):
        raise Unsupported(f"{source.given}: {source.spec.exportable}; plan it without --output")
    if plan.model.layer_scalars:
        raise Unsupported(
            f"{source.given}: no server was seen to load {plan.model.family} in this form; plan it without --output"
        )
    names = adapter_names(plan)
    if len(set(names)) < len(names):
        raise InvalidInput(f"--adapter: two folders have one name among {', '.join(names)}; rename one of them")
    return server_files(plan)


def write_bundle(
    plan: ServerPlan,
    source: ModelSource,
    texts: dict[str, str],
    output: Path,
    asked: Recipe | None,
    calibrating: QuantizeOptions,
) -> None:
    """Write the bundle to `output` atomically. `texts`: the result of `check_bundle`; `asked`: the recipe, if given."""
    staging = staging_for(output, 2 * weight_bytes(plan.model, plan.recipe))
    try:
        weights = _weights(source, staging / "weights", asked, calibrating)
        if plan.draft is not None:
            _weights(open_source(plan.draft, need_weights=True), staging / "draft", asked, calibrating)
        if plan.drafter is not None:
            write_head(Path(plan.drafter), plan.model, staging / "drafter")
        for path, name in zip(plan.adapters, adapter_names(plan), strict=True):
            folder = staging / "adapters" / name
            folder.mkdir(parents=True)
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                copy_file(Path(path) / file, folder / file)
        reference = reference_answers(weights, plan, calibrating.report.progress)
        written = texts | {
            "reference.json": reference.model_dump_json(indent=1) + "\n",
            "smoke_test.py": Path(smoke_test.__file__).read_text(),
            "plan.json": plan.to_json(),
            "README.md": readme(plan, sorted(texts)),
        }
        for name, text in written.items():
            write_file(staging / name, text.encode())
        sync_folder(staging)
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_folder(output.absolute().parent)


def _weights(source: ModelSource, folder: Path, asked: Recipe | None, calibrating: QuantizeOptions) -> NeutralWeights:
    """Write the weights of a model in the format that servers load."""
    recipe = recipe_for(source, asked)  # of neutral weights, refused unless servers load them
    if is_neutral(source.folder):
        NeutralWeights.open(source.folder, verify=True).copy_to(folder)
    else:
        quantize(source.given, recipe, folder, calibrating).release()
    return NeutralWeights.open(folder)
