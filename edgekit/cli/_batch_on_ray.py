"""A batch answered by the workers of a Ray cluster; the output file is written here, one line for each prompt.

If a worker is lost, Ray gives its unfinished prompts to another. No answer is lost or written twice, because an answer
is written when its task has returned.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import edgekit
from edgekit.cli._batch import BatchLine, answers_to, questions
from edgekit.common.progress import Progress
from edgekit.common.ray_map import results_on_ray
from edgekit.common.results_file import ResultsFile
from edgekit.errors import EdgekitError, InvalidInput
from edgekit.runtime.open_options import OpenOptions
from edgekit.runtime.runtime import Runtime

_LINES_A_TASK = 8  # bounds the answers that are repeated when a worker is lost


class BatchTask(NamedTuple):
    """Lines of a batch for one worker, with the options for opening the artifact and for the answers."""

    artifact: str
    opening: OpenOptions
    options: dict[str, Any]
    lines: tuple[BatchLine, ...]


def answer_on_ray(
    address: str,
    artifact: Path,
    path: Path,
    output: Path,
    opening: OpenOptions,
    options: dict[str, Any],
    progress: Progress,
) -> int:
    """Answer every line of `path` that `output` lacks. Returns the number of lines that failed."""
    every_line = questions(path)
    total, failed = every_line.count, 0
    with ResultsFile(output) as answers:
        lines = [one for one in every_line if one.name not in answers.names]
        tasks = [BatchTask(str(artifact.absolute()), opening, options, part) for part in _parts(lines)]
        progress(len(answers.names), total, "answers")
        with closing(results_on_ray(address, (artifact.absolute(),), answer_task, tasks)) as tasks_done:
            for place, results in tasks_done:
                if isinstance(results, EdgekitError):
                    results = [{"id": line.name, "error": str(results)} for line in tasks[place].lines]
                for result in results:
                    failed += "error" in result
                    answers.write(result)
                progress(len(answers.names), total, "answers")
    return failed


def _parts(lines: list[BatchLine]) -> Iterator[tuple[BatchLine, ...]]:
    for start in range(0, len(lines), _LINES_A_TASK):
        yield tuple(lines[start : start + _LINES_A_TASK])


def answer_task(task: BatchTask) -> list[dict[str, Any]]:
    """Answer the lines of one task; runs in a worker, which keeps the artifact open for its next task."""
    runtime = _opened(task.artifact, task.opening)
    return list(answers_to(runtime, task.options, task.lines))


@lru_cache(maxsize=1)
def _opened(artifact: str, opening: OpenOptions) -> Runtime:
    """Open the artifact once per worker process, within the worker's memory budget."""
    runtime = edgekit.open(artifact, opening)
    atexit.register(runtime.close)
    return runtime


def check_output_of_batch(output: Path | None) -> Path:
    """Require an output file: answers from a cluster arrive unordered, and a batch resumes from the file."""
    if output is None:
        raise InvalidInput("--ray: give --output FILE; a batch on a cluster continues from it")
    return output
