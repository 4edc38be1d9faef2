"""A quick artifact for this machine: 8 bits rounded to nearest, or the integers that a model has."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import click

from edgekit.api import build
from edgekit.artifact.export import ExportOptions, check_export
from edgekit.cli._progress import announce, progress_display, reporter
from edgekit.common.units import show_bytes
from edgekit.contracts.neutral import is_neutral
from edgekit.errors import TargetMissing
from edgekit.model.source import ModelSource
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target, target_names
from edgekit.quant.effort import why_rounded
from edgekit.quant.options import QuantOptions


def export_here(source: ModelSource, context: int | None, target: str | None, out: Path, store: Path) -> None:
    """Export `source` to `out` as `export --effort quick` does; print the choice and its reason to stderr.

    That takes seconds; calibrating 4 bits takes minutes. Nor are engines timed, so that the first answer comes sooner.
    """
    began = perf_counter()
    working = [name for name in target_names() if load_target(name).missing() is None]
    if target is None and len(working) == 1:
        target = working[0]  # even if plans take it only when it is named
    request, quick = PlanRequest(context=context, target=target), QuantOptions(effort="quick")
    (plan,) = make_plans(source, ["this"], request, may_measure=False, chosen_by=quick)
    missing = load_target(plan.target).missing()
    if missing is not None:
        raise TargetMissing(f"{source.given} cannot run here: {plan.target}: {missing}")
    check_export(plan, out, source)
    announce(
        f"making {source.given} as {plan.built_as} for this machine: "
        f"{show_bytes(plan.estimate.private_bytes)} of private memory, {show_bytes(plan.budget_bytes)} allowed, with "
        f"context {plan.context:,}, {plan.quality.show()} of top tokens kept"
    )
    has_choice = plan.recipe.keeps is None and not plan.recipe.is_exact() and not is_neutral(source.folder)
    if has_choice and not plan.model.encoder and why_rounded(source, None) is None:
        announce(f"rounded to {plan.recipe.name} in seconds; edgekit export makes 4 bits on text, which takes longer")
    with progress_display() as progress:
        options = ExportOptions(effort="quick" if has_choice else None, store=store, report=reporter(progress))
        build(source, [(plan, out)], options)
    click.echo(f"edgekit: made in {perf_counter() - began:.0f} s and kept (edgekit store ls)", err=True)
