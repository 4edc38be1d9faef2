"""`edgekit embed`: one vector for each text of a file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from pydantic import Field

from edgekit.cli._lines import check_keys, name_of, plain_text, read_lines, submitted_ahead
from edgekit.cli._options import options
from edgekit.cli._progress import progress_display
from edgekit.common.base import Frozen
from edgekit.common.results_file import ResultsFile
from edgekit.errors import ContextExceeded, EdgekitError, InvalidInput
from edgekit.model.parts import Pooling

if TYPE_CHECKING:
    from edgekit.runtime.embedding import Embedding
    from edgekit.runtime.runtime import Runtime

_KEYS = {"id", "text"}


class EmbedLine(NamedTuple):
    """One text and its id."""

    name: str | int
    text: str


class EmbedOptions(Frozen):
    """The options of `Runtime.embed`."""

    pooling: Pooling | None = Field(
        default=None, description="How token vectors become one text vector; without it, as the model's files say."
    )
    prompt: str | None = Field(
        default=None, description="The name of one of the model's prompts, which is put before each text."
    )
    dimensions: int | None = Field(
        default=None,
        description="Keep only this many values; for models that declare Matryoshka dimensions.",
    )
    truncate: bool = Field(default=False, description="Cut texts that are too long, instead of reporting an error.")
    unscaled: bool = Field(default=False, description="Do not normalise vectors to length 1.")

    def given(self) -> dict[str, Any]:
        """Return the keyword arguments of `Runtime.embed`."""
        options = self.model_dump(exclude={"unscaled"})
        return {**options, "normalise": False} if self.unscaled else options


@click.command(name="embed")
@click.argument("artifact", type=Path)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@options(embedding=EmbedOptions)
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Write jsonl here; resumable.")
def command(artifact: Path, file: Path, embedding: EmbedOptions, output: Path | None) -> int:
    """Print one vector for each text in FILE, as jsonl.

    A FILE that ends in .jsonl has objects with `text` and, where you like, `id`; any other has one text a line. Each
    line of the output has `id`, `embedding` and `tokens`. An interrupted run continues when it is started again with
    the same output.
    """
    import edgekit

    total = sum(1 for _ in _lines(file))  # every line is checked before the first is embedded
    failed = 0
    with (
        edgekit.open(artifact) as runtime,
        progress_display() as progress,
        ResultsFile(output) as results,
    ):
        lines = (line for line in _lines(file) if line.name not in results.names)
        done = len(results.names)
        for line, job in submitted_ahead(lines, partial(_submit, runtime, embedding), 4 * runtime.sequences):
            result = _result(line, job)
            failed += "error" in result
            results.write(result)
            done += 1
            progress(done, total, f"embeddings: {line.name}")
    if failed:
        click.echo(f"{failed} lines have an error in place of an embedding", err=True)
    return 1 if failed else 0


def _lines(path: Path) -> Iterator[EmbedLine]:
    if path.suffix == ".jsonl":
        return read_lines(path, _line)
    return read_lines(path, lambda text, where, number: EmbedLine(number, text), plain_text)


def _line(line: dict[str, Any], where: str, number: int) -> EmbedLine:
    check_keys(line, where, _KEYS)
    if not isinstance(line.get("text"), str):
        raise InvalidInput(f"{where}: give `text`, a text")
    return EmbedLine(name_of(line, where, number), line["text"])


def _submit(runtime: Runtime, embedding: EmbedOptions, line: EmbedLine) -> Embedding | EdgekitError:
    try:
        return runtime.submit_embed([line.text], **embedding.given())
    except ContextExceeded as error:
        return error


def _result(line: EmbedLine, job: Embedding | EdgekitError) -> dict[str, Any]:
    try:
        if isinstance(job, EdgekitError):
            raise job
        (vector,), (tokens,) = job.vectors(), job.tokens
    except EdgekitError as error:
        return {"id": line.name, "error": str(error)}
    return {"id": line.name, "embedding": vector.tolist(), "tokens": tokens}
