"""Files of one request a line (jsonl), for commands that answer a whole file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from edgekit.common.parsing import parse_json
from edgekit.errors import InvalidInput, quote_short

_MAX_LINE_BYTES = 16 << 20


class NamedLine(Protocol):
    """A line that was read."""

    @property
    def name(self) -> str | int: ...


Line = TypeVar("Line", bound=NamedLine)
Submitted = TypeVar("Submitted")


def plain_text(data: bytes, where: str) -> str:
    """Return a line as text, without its end."""
    try:
        return data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise InvalidInput(f"{where}: is not UTF-8; convert the file") from None


def read_lines(
    path: Path, read: Callable[[Any, str, int], Line], parse: Callable[[bytes, str], Any] = parse_json
) -> Iterator[Line]:
    """Yield what `read` makes of each parsed line, its place in words and its number; blank lines are skipped.

    Raises `InvalidInput` with the number of a faulty line, and where a name comes twice.
    """
    names: set[str | int] = set()
    try:
        with path.open("rb") as file:
            for number, text in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
                where = f"{path}, line {number}"
                if len(text) > _MAX_LINE_BYTES:
                    raise InvalidInput(f"{where}: longer than {_MAX_LINE_BYTES >> 20} MiB")
                if not text.strip():
                    continue
                line = read(parse(text, where), where, number)
                if line.name in names:
                    raise InvalidInput(f"{where}: the id {quote_short(line.name)} is used twice")
                names.add(line.name)
                yield line
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}; check the path") from error


def check_keys(line: dict[str, Any], where: str, known: Collection[str]) -> None:
    """Refuse a line with a key that is not among `known`."""
    unknown = line.keys() - known
    if unknown:
        raise InvalidInput(f"{where}: unknown key {quote_short(min(unknown))}; known: {', '.join(sorted(known))}")


def name_of(line: dict[str, Any], where: str, number: int) -> str | int:
    """Return the id of a line, its number where it has none."""
    name: str | int = line.get("id", number)
    if type(name) not in (str, int):
        raise InvalidInput(f"{where}: id must be a string or an integer, found {quote_short(name)}")
    return name


def name_and_prompt(line: dict[str, Any], where: str, number: int) -> tuple[str | int, Any]:
    """Return the id of a line, its number where it has none, and its `prompt` or `messages`."""
    name = name_of(line, where, number)
    prompts = [line[key] for key in ("prompt", "messages") if key in line]
    if len(prompts) != 1 or not isinstance(prompts[0], str if "prompt" in line else list):
        raise InvalidInput(f"{where}: give `prompt`, a text, or `messages`, a list of messages")
    return name, prompts[0]


def submitted_ahead(
    lines: Iterable[Line], submit: Callable[[Line], Submitted], count: int
) -> Iterator[tuple[Line, Submitted]]:
    """Yield each line with what `submit` gave for it, in order, `count` lines being submitted at once.

    With more than can run, a long answer does not leave free slots in the batch.
    """
    waiting: deque[tuple[Line, Submitted]] = deque()
    for line in lines:
        waiting.append((line, submit(line)))
        if len(waiting) == count:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()
