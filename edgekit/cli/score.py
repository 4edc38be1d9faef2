"""`edgekit score`: log-probabilities of given continuations, or of whole texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from edgekit.cli._console import draw
from edgekit.cli._lines import check_keys, name_and_prompt, read_lines, submitted_ahead
from edgekit.cli._progress import progress_display
from edgekit.common.results_file import ResultsFile
from edgekit.errors import EdgekitError, InvalidInput, quote_short

if TYPE_CHECKING:
    from edgekit.runtime.runtime import Runtime
    from edgekit.runtime.scoring import Score, Scoring

_KEYS = {"id", "prompt", "messages", "continuations"}


class ScoreLine(NamedTuple):
    """One line of the file: a prompt with continuations, or a prompt that is itself scored."""

    name: str | int
    prompt: Any
    continuations: list[str]


@click.command(name="score")
@click.argument("artifact", type=Path)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Write jsonl here; resumable.")
@click.option("--sequences", type=int, help="Batch size: lines that are computed together; without it, as planned.")
@click.option("--json", "as_json", is_flag=True, help="Print jsonl instead of a table.")
def command(artifact: Path, file: Path, output: Path | None, sequences: int | None, as_json: bool) -> int:
    """Print the log-probability that ARTIFACT gives each continuation in FILE, a jsonl.

    A line has `prompt` (a text) or `messages`, and `continuations`, a list of texts; without them the prompt itself is
    scored. Log-probabilities are natural. An interrupted run continues when it is started again with the same output.
    """
    import edgekit

    if as_json and output is not None:
        raise InvalidInput("--json prints to standard output and --output writes to a file; give one of them")
    total = sum(1 for _ in _lines(file))  # every line is checked before the first is scored
    failed, rows = 0, list[tuple[str, ...]]()
    with (
        edgekit.open(artifact, sequences=sequences) as runtime,
        progress_display() as progress,
        ResultsFile(output) as results,
    ):
        lines = (line for line in _lines(file) if line.name not in results.names)
        done = len(results.names)
        for line, scoring in submitted_ahead(lines, partial(_submit, runtime), 4 * runtime.sequences):
            result = _result(runtime, line, scoring)
            failed += "error" in result
            if as_json or output is not None:
                results.write(result)
            else:
                rows += _rows(line, result)
            done += 1
            progress(done, total, f"scores: {line.name}")
    if rows:
        draw(("id", "text", "total", "mean", "tokens", "greedy"), rows)
    if failed:
        click.echo(f"{failed} lines have an error in place of scores", err=True)
    return 1 if failed else 0


def _lines(path: Path) -> Iterator[ScoreLine]:
    return read_lines(path, _line)


def _line(line: dict[str, Any], where: str, number: int) -> ScoreLine:
    check_keys(line, where, _KEYS)
    name, prompt = name_and_prompt(line, where, number)
    continuations = line.get("continuations", [])
    if not isinstance(continuations, list) or not all(isinstance(text, str) for text in continuations):
        raise InvalidInput(f"{where}: continuations must be a list of texts, found {quote_short(continuations)}")
    return ScoreLine(name, prompt, continuations)


def _submit(runtime: Runtime, line: ScoreLine) -> Scoring | EdgekitError:
    try:
        if line.continuations:
            return runtime.submit_score(line.prompt, line.continuations)
        return runtime.submit_prompt_logprobs(line.prompt)
    except EdgekitError as error:
        return error


def _result(runtime: Runtime, line: ScoreLine, scoring: Scoring | EdgekitError) -> dict[str, Any]:
    try:
        if isinstance(scoring, EdgekitError):
            raise scoring
        scores = scoring.scores()
    except EdgekitError as error:
        return {"id": line.name, "error": str(error)}
    texts: Sequence[str | None] = line.continuations or [None]
    return {"id": line.name, "scores": [_score(text, score) for text, score in zip(texts, scores, strict=True)]}


def _score(text: str | None, score: Score) -> dict[str, Any]:
    """Return one score as JSON; `text` is None if the prompt itself was scored."""
    return ({} if text is None else {"text": text}) | {
        "total": score.total,
        "mean": score.mean,
        "is_greedy": score.is_greedy,
        "tokens": list(score.tokens),
        "logprobs": list(score.logprobs),
    }


def _rows(line: ScoreLine, result: dict[str, Any]) -> list[tuple[str, ...]]:
    if "error" in result:
        return [(str(line.name), result["error"], "", "", "", "")]
    return [
        (
            str(line.name),
            quote_short(score.get("text", "the prompt itself"), 48),
            f"{score['total']:.4f}",
            f"{score['mean']:.4f}",
            str(len(score["tokens"])),
            "yes" if score["is_greedy"] else "no",
        )
        for score in result["scores"]
    ]
