"""`edgekit score`: log-probabilities of given continuations, or of whole texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from edgekit.cli._console import draw
from edgekit.cli._lines import LineFile, LineWork, check_keys, name_and_prompt, work_through
from edgekit.cli._options import LinesOutput, SomeFields, json_option, options
from edgekit.errors import InvalidInput, quote_short
from edgekit.runtime.open_options import OpenOptions

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
@options(opening=SomeFields(OpenOptions, ("sequences",)), written=LinesOutput)
@json_option("Print jsonl instead of a table.")
def command(artifact: Path, file: Path, opening: OpenOptions, written: LinesOutput, as_json: bool) -> int:
    """Print the log-probability that ARTIFACT gives each continuation in FILE, a jsonl.

    A line has `prompt` (a text) or `messages`, and `continuations`, a list of texts; without them the prompt itself is
    scored. Log-probabilities are natural. An interrupted run continues when it is started again with the same output.
    """
    import edgekit

    output = written.output
    if as_json and output is not None:
        raise InvalidInput("--json prints to standard output and --output writes to a file; give one of them")
    lines, table = LineFile(file, _line), list[dict[str, Any]]()
    with edgekit.open(artifact, opening) as runtime:
        write = None if as_json or output is not None else table.append
        code = work_through(runtime, lines, output, LineWork(_submit, _scores, "scores"), write)
    if table:
        draw(("id", "text", "total", "mean", "tokens", "greedy"), [row for result in table for row in _rows(result)])
    return code


def _line(line: dict[str, Any], where: str, number: int) -> ScoreLine:
    check_keys(line, where, _KEYS)
    name, prompt = name_and_prompt(line, where, number)
    continuations = line.get("continuations", [])
    if not isinstance(continuations, list) or not all(isinstance(text, str) for text in continuations):
        raise InvalidInput(f"{where}: continuations must be a list of texts, found {quote_short(continuations)}")
    return ScoreLine(name, prompt, continuations)


def _submit(runtime: Runtime, line: ScoreLine) -> Scoring:
    if line.continuations:
        return runtime.submit_score(line.prompt, line.continuations)
    return runtime.submit_prompt_logprobs(line.prompt)


def _scores(line: ScoreLine, scoring: Scoring) -> dict[str, Any]:
    texts: Sequence[str | None] = line.continuations or [None]
    return {"scores": [_score(text, score) for text, score in zip(texts, scoring.scores(), strict=True)]}


def _score(text: str | None, score: Score) -> dict[str, Any]:
    """Return one score as JSON; `text` is None if the prompt itself was scored."""
    return ({} if text is None else {"text": text}) | {
        "total": score.total,
        "mean": score.mean,
        "is_greedy": score.is_greedy,
        "tokens": list(score.tokens),
        "logprobs": list(score.logprobs),
    }


def _rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    name = str(result["id"])
    if "error" in result:
        return [(name, result["error"], "", "", "", "")]
    return [
        (
            name,
            quote_short(score.get("text", "the prompt itself"), 48),
            f"{score['total']:.4f}",
            f"{score['mean']:.4f}",
            str(len(score["tokens"])),
            "yes" if score["is_greedy"] else "no",
        )
        for score in result["scores"]
    ]
