"""`edgekit eval`: how far an artifact is from its float model, and how it does on tasks."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit.cli._progress import progress_display
from edgekit.cli._reports import check_reports, show, show_notes, write_reports


@click.command(name="eval")
@click.argument("artifact", type=Path)
@click.option("--reference", help="The float model, or another artifact, instead of the model it was made of.")
@click.option("--text", type=Path, help="A text file, or jsonl with `text` fields, instead of the bundled text.")
@click.option("--tasks", type=Path, help="A jsonl of tasks: choice, exact or tool.")
@click.option("--tokens", type=click.IntRange(16, 1 << 24), default=4096, show_default=True, help="How much is read.")
@click.option("--window", type=click.IntRange(16, 1 << 17), default=512, show_default=True, help="Tokens at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print the Evaluation as JSON, and nothing else.")
@click.option("--output", "-o", type=Path, help="Write the whole report here as JSON.")
@click.option("--html", type=Path, help="Write it here as one HTML page.")
@click.option("--markdown", type=Path, help="Write it here as Markdown.")
def command(
    artifact: Path,
    reference: str | None,
    text: Path | None,
    tasks: Path | None,
    tokens: int,
    window: int,
    as_json: bool,
    output: Path | None,
    html: Path | None,
    markdown: Path | None,
) -> int:
    """Compare ARTIFACT with its float model on the same tokens: perplexity, KL divergence, equal top tokens.

    The result is kept, and `edgekit plan` uses it in place of what it expected. Exits with 5 where the artifact reads
    or ends texts differently from its model.
    """
    from edgekit.measure.quality import evaluate
    from edgekit.measure.report.tables import checks_table, notes_of, quality_table, tasks_table
    from edgekit.measure.results import Report
    from edgekit.measure.tasks import read_tasks

    check_reports(output, html, markdown, charts=False)
    asked = read_tasks(tasks) if tasks else None
    with progress_display() as progress:
        found = evaluate(
            artifact,
            reference=reference,
            text=text,
            tasks=asked,
            tokens=tokens,
            window_tokens=window,
            progress=progress,
        )
    report = Report(title=f"Quality of {found.model} {found.recipe}", evaluations=(found,))
    write_reports(report, output, html, markdown)
    if as_json:
        click.echo(found.model_dump_json())
    else:
        show(quality_table([found]))
        if found.tasks:
            show(tasks_table([found]))
        if not found.is_sound:
            show(checks_table([found]))
        show_notes(notes_of(report))
        click.echo(f"kept as {found.fact}" if found.fact else "not kept for plans: it was not compared with its model")
    return 0 if found.is_sound else 5
