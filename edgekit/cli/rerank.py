"""`edgekit rerank`: the documents of each line of a file, ordered for its query."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from pydantic import Field

from edgekit.cli._lines import LineFile, LineWork, check_keys, name_of, work_through
from edgekit.cli._options import LinesOutput, options
from edgekit.common.base import Frozen
from edgekit.errors import ContextExceeded, InvalidInput

if TYPE_CHECKING:
    from edgekit.runtime.reranking import Ranking
    from edgekit.runtime.runtime import Runtime

_KEYS = {"id", "query", "documents"}


class RerankLine(NamedTuple):
    """One query with its documents, and its id."""

    name: str | int
    query: str
    documents: list[str]


class RerankOptions(Frozen):
    """The options of `Runtime.rerank`."""

    instruction: str | None = Field(
        default=None,
        description="What makes a document relevant, for models that take an instruction; without it, a web search's.",
    )
    top_n: int | None = Field(default=None, ge=1, description="Keep only this many documents of a line.")
    truncate: bool = Field(default=False, description="Cut documents that are too long, instead of reporting an error.")


@click.command(name="rerank")
@click.argument("artifact", type=Path)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@options(reranking=RerankOptions, written=LinesOutput)
def command(artifact: Path, file: Path, reranking: RerankOptions, written: LinesOutput) -> int:
    """Order the documents of each line of FILE, a jsonl, for its query.

    A line has `query`, `documents` (a list of texts) and, where you like, `id`. Each line of the output has `id`,
    `results`, the best first, with `index` and `score`, and `tokens`. An interrupted run continues when it is started
    again with the same output.
    """
    import edgekit

    lines, work = LineFile(file, _line), LineWork(partial(_submit, reranking), _ranked, "rankings", ContextExceeded)
    with edgekit.open(artifact) as runtime:
        return work_through(runtime, lines, written.output, work)


def _line(line: dict[str, Any], where: str, number: int) -> RerankLine:
    check_keys(line, where, _KEYS)
    query, documents = line.get("query"), line.get("documents")
    if not isinstance(query, str):
        raise InvalidInput(f"{where}: give `query`, a text")
    if not isinstance(documents, list) or not documents or not all(isinstance(each, str) for each in documents):
        raise InvalidInput(f"{where}: give `documents`, a list of texts")
    return RerankLine(name_of(line, where, number), query, documents)


def _submit(reranking: RerankOptions, runtime: Runtime, line: RerankLine) -> Ranking:
    return runtime.submit_rerank(line.query, line.documents, **reranking.model_dump())


def _ranked(line: RerankLine, job: Ranking) -> dict[str, Any]:
    return {"results": [{"index": each.index, "score": each.score} for each in job.ranked()], "tokens": sum(job.tokens)}
