"""Files with one request per line: reading them, and writing one result per line. An interrupted run continues."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import click

from edgekit.cli._progress import progress_display
from edgekit.common.files import not_read
from edgekit.common.parsing import parse_json
from edgekit.common.results_file import ResultsFile
from edgekit.errors import EdgekitError, InvalidInput, quote_short

if TYPE_CHECKING:
    from edgekit.runtime.runtime import Runtime

_MAX_LINE_BYTES = 16 << 20


class NamedLine(Protocol):
    """A parsed line with an id."""

    @property
    def name(self) -> str | int: ...


Line = TypeVar("Line", bound=NamedLine)
Submitted = TypeVar("Submitted")


def plain_text(data: bytes, where: str) -> str:
    """Decode a line and strip its line break."""
    try:
        return data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise InvalidInput(f"{where}: is not UTF-8; convert the file") from None


class LineFile(Generic[Line]):
    """A file with one request per line. Every line is checked at once, and read again by each iteration.

    Args:
        read: makes a request of a parsed line, "FILE, line N" and N. Blank lines are skipped.
        parse: parses the bytes of a line.

    Raises `InvalidInput` with the line number for a faulty line or a repeated id.
    """

    def __init__(
        self, path: Path, read: Callable[[Any, str, int], Line], parse: Callable[[bytes, str], Any] = parse_json
    ) -> None:
        self._path, self._read, self._parse = path, read, parse
        self.count = sum(1 for _ in self)

    def __iter__(self) -> Iterator[Line]:
        names: set[str | int] = set()
        try:
            with self._path.open("rb") as file:
                for number, text in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
                    where = f"{self._path}, line {number}"
                    if len(text) > _MAX_LINE_BYTES:
                        raise InvalidInput(f"{where}: longer than {_MAX_LINE_BYTES >> 20} MiB; split it")
                    if not text.strip():
                        continue
                    line = self._read(self._parse(text, where), where, number)
                    if line.name in names:
                        raise InvalidInput(f"{where}: the id {quote_short(line.name)} is used twice")
                    names.add(line.name)
                    yield line
        except OSError as error:
            raise not_read(self._path, error) from error


def check_keys(line: dict[str, Any], where: str, known: Collection[str]) -> None:
    """Raise `InvalidInput` if the line has a key that is not in `known`."""
    unknown = line.keys() - known
    if unknown:
        raise InvalidInput(f"{where}: unknown key {quote_short(min(unknown))}; known: {', '.join(sorted(known))}")


def name_of(line: dict[str, Any], where: str, number: int) -> str | int:
    """Return the line's `id`; without one, its number."""
    name: str | int = line.get("id", number)
    if type(name) not in (str, int):
        raise InvalidInput(f"{where}: id must be a string or an integer, found {quote_short(name)}")
    return name


def name_and_prompt(line: dict[str, Any], where: str, number: int) -> tuple[str | int, Any]:
    """Return the line's `id` (without one, its number) and its `prompt` or `messages`."""
    name = name_of(line, where, number)
    prompts = [line[key] for key in ("prompt", "messages") if key in line]
    if len(prompts) != 1 or not isinstance(prompts[0], str if "prompt" in line else list):
        raise InvalidInput(f"{where}: give `prompt`, a text, or `messages`, a list of messages")
    return name, prompts[0]


class LineWork(NamedTuple, Generic[Line, Submitted]):
    """What a command does with each line. Errors of `submit` that are not `refusals` concern every line."""

    submit: Callable[[Runtime, Line], Submitted]
    wait: Callable[[Line, Submitted], dict[str, Any]]  # returns the fields of the result
    what: str  # the results, for the user
    refusals: type[EdgekitError] = EdgekitError


def work_through(
    runtime: Runtime,
    lines: LineFile[Line],
    output: Path | None,
    work: LineWork[Line, Submitted],
    write: Callable[[dict[str, Any]], object] | None = None,
) -> int:
    """Write the result of each line that `output` lacks, or pass it to `write`; return 1 if one failed, else 0."""
    failed = 0
    with progress_display() as progress, ResultsFile(output) as results:
        missing = (line for line in lines if line.name not in results.names)
        progress(len(results.names), lines.count, work.what)
        for done, result in enumerate(_results(runtime, missing, work), len(results.names) + 1):
            (write or results.write)(result)
            failed += "error" in result
            progress(done, lines.count, f"{work.what}: {result['id']}")
    if failed:
        click.echo(f"{failed} lines have an error in place of {work.what}", err=True)
    return 1 if failed else 0


def _results(runtime: Runtime, lines: Iterable[Line], work: LineWork[Line, Submitted]) -> Iterator[dict[str, Any]]:
    """Yield the result of each line, in order.

    Lines are submitted ahead, more than a batch has slots, so that a long one leaves none idle.
    """
    waiting: deque[tuple[Line, Submitted | EdgekitError]] = deque()

    def finish() -> dict[str, Any]:
        line, job = waiting.popleft()
        try:
            if isinstance(job, EdgekitError):
                raise job
            return {"id": line.name, **work.wait(line, job)}
        except EdgekitError as error:
            return {"id": line.name, "error": str(error)}

    for line in lines:
        job: Submitted | EdgekitError
        try:
            job = work.submit(runtime, line)
        except work.refusals as error:
            job = error
        waiting.append((line, job))
        if len(waiting) == 4 * runtime.sequences:
            yield finish()
    while waiting:
        yield finish()
