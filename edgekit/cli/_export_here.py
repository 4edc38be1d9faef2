"""A quick artifact for this machine: 8 bits rounded to nearest, or the integers that a model has."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import click

from edgekit.api import build
from edgekit.artifact.export import ExportOptions, check_export
from edgekit.cli._progress import announce, progress_display, reporter
from edgekit.common.units import show_bytes
from edgekit.contracts.neutral import is_neutral
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import named_recipe
from edgekit.errors import DoesNotFit, TargetMissing
from edgekit.model.source import ModelSource
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target, target_names
from edgekit.quant.effort import Effort


def export_here(source: ModelSource, context: int | None, target: str | None, out: Path, store: Path) -> None:
    """Export `source` to `out`, with neutral weights in `store`; print the choice and its reason to stderr."""
    began = perf_counter()
    plan = _plan(source, context, target)
    check_export(plan, out, source)
    announce(
        f"making {source.given} as {plan.built_as} for this machine: "
        f"{show_bytes(plan.estimate.private_bytes)} of private memory, {show_bytes(plan.budget_bytes)} allowed, with "
        f"context {plan.context:,}, {plan.quality.show()} of top tokens kept"
    )
    effort: Effort | None = None if _has_integers(source, plan) else "quick"
    with progress_display() as progress:
        options = ExportOptions(effort=effort, store=store, report=reporter(progress))
        build(source, [(plan, out)], options)
    click.echo(f"edgekit: made in {perf_counter() - began:.0f} s and kept (edgekit store ls)", err=True)


def _plan(source: ModelSource, context: int | None, target: str | None) -> Plan:
    """Plan for this machine; a float model gets 8 bits if they fit.

    Rounding to 8 bits takes seconds; calibrating 4 bits takes minutes. Engines are not timed here, so that the first
    answer comes sooner.
    """
    working = [name for name in target_names() if load_target(name).missing() is None]
    if target is None and len(working) == 1:
        target = working[0]  # even if plans take it only when it is named
    (plan,) = make_plans(source, ["this"], PlanRequest(context=context, target=target), may_measure=False)
    missing = load_target(plan.target).missing()
    if missing is not None:
        raise TargetMissing(f"{source.given} cannot run here: {plan.target}: {missing}")
    if _has_integers(source, plan):
        return plan
    # 4 bits without calibration, where neither 8 bits fit nor torch is there to calibrate.
    for recipe in ("s8",) if find_spec("torch") else ("s8", "s4-g32"):
        request = PlanRequest(context=context, target=plan.target, recipe=named_recipe(recipe))
        with suppress(DoesNotFit):
            return make_plans(source, ["this"], request, may_measure=False)[0]
    return plan


def _has_integers(source: ModelSource, plan: Plan) -> bool:
    """Return whether the model comes quantised, so that no integers must be chosen."""
    return plan.recipe.keeps is not None or is_neutral(source.folder)
