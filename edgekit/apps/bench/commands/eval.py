"""`edgekit eval`: how far an artifact is from its float model, and how it does on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

from edgekit.apps.bench.commands.reports import ReportFiles, show_report
from edgekit.commands import SectionedCommand, json_option, options, progress_display
from edgekit.common.base import Frozen
from edgekit.errors import InvalidInput


class EvalSubject(Frozen):
    """The model to compare with, and the tasks."""

    reference: str | None = Field(default=None, description="The float model, instead of the one it was made from.")
    tasks: Path | None = Field(default=None, description="A jsonl of your own tasks: choice, exact or tool.")


class EvalText(Frozen):
    """The text on which models are compared."""

    text: Path | None = Field(
        default=None, description="A text file, or jsonl with `text` fields, instead of the bundled text."
    )
    tokens: Annotated[int, Field(ge=16, le=1 << 24)] = Field(default=4096, description="Tokens of the text to read.")
    window: Annotated[int, Field(ge=16, le=1 << 17)] = Field(default=512, description="Tokens in each piece of it.")


_EXAMPLES = """\b
Examples:
  edgekit eval my-artifact
  edgekit eval my-artifact --tasks my-tasks.jsonl
"""


@click.command(name="eval", cls=SectionedCommand, epilog=_EXAMPLES)
@click.argument("artifact", type=Path)
@options(subject=EvalSubject, read=EvalText, files=ReportFiles)
@json_option("Print the Evaluation as JSON, and nothing else.")
def command(
    artifact: Path,
    subject: EvalSubject,
    read: EvalText,
    files: ReportFiles,
    as_json: bool,
) -> int:
    """Compare ARTIFACT with its float model on the same tokens: perplexity, KL divergence, equal top tokens.

    The result is kept, and `edgekit plan` uses it instead of its prior. Exits with 5 if the tokenizer, the
    chat template or the end-of-text tokens differ from the model's.
    """
    from edgekit.apps.bench.eval.evaluate import BUNDLED_TEXT, evaluate
    from edgekit.apps.bench.eval.local_tasks import read_tasks
    from edgekit.apps.bench.report.results import Report

    files.check()
    if subject.tasks is not None and not subject.tasks.exists():
        raise InvalidInput(
            f"--tasks {subject.tasks}: no such file; public tasks are asked by lm-eval, of `edgekit serve`"
        )
    tasks = read_tasks(subject.tasks) if subject.tasks is not None else None
    with progress_display() as progress:
        evaluation = evaluate(
            artifact,
            reference=subject.reference,
            text=read.text,
            tasks=tasks,
            tokens=read.tokens,
            window_tokens=read.window,
            progress=progress,
        )
    report = Report(title=f"Quality of {evaluation.model} {evaluation.recipe}", evaluations=(evaluation,))
    files.write(report)
    if as_json:
        click.echo(evaluation.model_dump_json())
    else:
        show_report(report)
        if read.text is None and evaluation.model != "demo":
            click.echo(f"measured on {BUNDLED_TEXT}; --text FILE measures on a text like your users'")
        kept = f"kept as {evaluation.fact}" if evaluation.fact else "not kept: it was not compared with its model"
        click.echo(kept)
    return 0 if evaluation.is_sound else 5
