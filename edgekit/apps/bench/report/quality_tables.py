"""The tables of evaluations: quality, tasks, and checks of the text interface."""

from __future__ import annotations

from collections.abc import Sequence

from edgekit.apps.bench.eval.evaluation import Evaluation
from edgekit.apps.bench.report.cells import Table
from edgekit.common.units import show_bytes


def quality_table(evaluations: Sequence[Evaluation]) -> Table:
    rows = []
    for one in evaluations:
        divergence = one.divergence
        if divergence is None:
            continue
        rows.append(
            (
                f"{one.target} {one.backend} {one.recipe}",
                f"{divergence.kl_mean:.3g} ± {divergence.kl_error:.1g}",
                f"{divergence.kl_median:.3g}",
                f"{divergence.kl_p999:.3g}",
                f"{divergence.kl_max:.3g}",
                f"{divergence.same_top:.2%} ± {divergence.same_top_error:.2%}",
                f"{divergence.perplexity:.4g}",
                f"{divergence.reference_perplexity:.4g}",
                f"{divergence.log_ratio:+.4f} ± {divergence.log_ratio_error:.4f}",
                f"{one.bits_per_weight:g}",
                show_bytes(one.file_bytes),
            )
        )
    first = evaluations[0]
    counted = f"{first.divergence.tokens:,} tokens of " if first.divergence else ""
    return Table(
        "Quality",
        ("artifact", "KL", "median", "99.9 %", "max", "same top token", "perplexity",
         "of the reference", "ln ratio", "bits a weight", "files"),
        tuple(rows),
        f"{counted}{first.text}, windows of {first.window_tokens}, against {first.reference}. ± is one standard error, "
        "paired where two models are compared.",
    )  # fmt: skip


def tasks_table(evaluations: Sequence[Evaluation]) -> Table:
    rows = [
        (
            f"{one.target} {one.backend} {one.recipe}",
            task.kind,
            f"{task.right} of {task.asked}",
            f"{task.share:.1%} ± {task.error:.1%}",
            task.failures[0] if task.failures else "",
        )
        for one in evaluations
        for task in one.tasks
    ]
    return Table("Tasks", ("artifact", "kind", "right", "share", "first failure"), tuple(rows))


def checks_table(evaluations: Sequence[Evaluation]) -> Table:
    rows = [
        (f"{one.target} {one.backend} {one.recipe}", check.what, "same" if check.same else "DIFFERS", check.detail)
        for one in evaluations
        if not one.is_sound
        for check in one.checks
    ]
    return Table("Text to tokens", ("artifact", "what", "", "difference"), tuple(rows))
