"""Results of public tasks as tables."""

from __future__ import annotations

from edgekit.apps.bench.report.cells import Table
from edgekit.apps.bench.tasks.results import TaskReport


def public_tasks_table(report: TaskReport) -> Table:
    rows = []
    for one in report.results:
        for name, share in [("", one.share), *((group.name, group.share) for group in one.groups)]:
            rows.append(
                (
                    f"{one.task} {name}".strip(),
                    one.artifact,
                    one.recipe,
                    f"{share.right} of {share.asked}" + (f" ({one.unanswered} do not fit)" if one.unanswered else ""),
                    f"{share.share:.1%}",
                    f"{share.low:.1%} to {share.high:.1%}",
                    "" if name else f"{one.seconds:.0f} s, {one.processor_s:.0f} s",
                )
            )
    note = "Intervals are Wilson's. Time is for answering, without judging; processor time is of all threads."
    head = ("task", "artifact", "recipe", "right", "share", "95 % interval", "time, processor")
    return Table(
        "Tasks",
        head,
        tuple(rows),
        note,
    )


def comparisons_table(report: TaskReport) -> Table:
    rows = [
        (
            one.task,
            one.artifact,
            one.reference,
            f"{100 * one.paired.difference:+.1f}",
            f"{100 * one.paired.low:+.1f} to {100 * one.paired.high:+.1f}",
            f"{one.paired.only_first} / {one.paired.only_second}",
            f"{one.paired.p_value:.2g}",
        )
        for one in report.comparisons
    ]
    head = ("task", "artifact", "compared with", "points", "95 % interval", "only one right", "p")
    note = "The same items, paired: intervals by Newcombe's method, p by McNemar's exact test."
    return Table("Difference", head, tuple(rows), note)
