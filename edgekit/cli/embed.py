"""`edgekit embed`: one vector for each text of a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from pydantic import Field

from edgekit.cli._lines import LineFile, LineWork, check_keys, name_of, plain_text, work_through
from edgekit.cli._options import LinesOutput, options
from edgekit.common.base import Frozen
from edgekit.errors import ContextExceeded, InvalidInput
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
        default=None,
        description="How token vectors become one text vector; without it, as the model's files say, else mean.",
    )
    prompt: str | None = Field(
        default=None, description="The name of one of the model's prompts, which is put before each text."
    )
    dimensions: int | None = Field(
        default=None, description="Keep only this many values; for models that declare Matryoshka dimensions."
    )
    truncate: bool = Field(default=False, description="Cut texts that are too long, instead of reporting an error.")


@click.command(name="embed")
@click.argument("artifact", type=Path)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@options(embedding=EmbedOptions, written=LinesOutput)
def command(artifact: Path, file: Path, embedding: EmbedOptions, written: LinesOutput) -> int:
    """Print one vector for each text in FILE, as jsonl.

    A FILE that ends in .jsonl has objects with `text` and, where you like, `id`; any other has one text a line. Each
    line of the output has `id`, `embedding` and `tokens`. An interrupted run continues when it is started again with
    the same output.
    """
    import edgekit

    lines = LineFile(file, _line) if file.suffix == ".jsonl" else LineFile(file, _text, plain_text)
    work = LineWork(partial(_submit, embedding), _vector, "embeddings", ContextExceeded)
    with edgekit.open(artifact) as runtime:
        return work_through(runtime, lines, written.output, work)


def _line(line: dict[str, Any], where: str, number: int) -> EmbedLine:
    check_keys(line, where, _KEYS)
    if not isinstance(line.get("text"), str):
        raise InvalidInput(f"{where}: give `text`, a text")
    return EmbedLine(name_of(line, where, number), line["text"])


def _text(text: str, where: str, number: int) -> EmbedLine:
    return EmbedLine(number, text)


def _submit(embedding: EmbedOptions, runtime: Runtime, line: EmbedLine) -> Embedding:
    return runtime.submit_embed([line.text], **embedding.model_dump())


def _vector(line: EmbedLine, job: Embedding) -> dict[str, Any]:
    (vector,), (tokens,) = job.vectors(), job.tokens
    return {"embedding": vector.tolist(), "tokens": tokens}
