"""Readers of jsonl files with one request per line, for commands that process a whole file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from edgekit.common.parsing import parse_json
from edgekit.errors import InvalidInput, quote_short

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


def read_lines(
    path: Path, read: Callable[[Any, str, int], Line], parse: Callable[[bytes, str], Any] = parse_json
) -> Iterator[Line]:
    """Yield `read(parsed line, "FILE, line N", N)` for each line; blank lines are skipped.

    Raises `InvalidInput` with the line number for a faulty line or a repeated id.
    """
    names: set[str | int] = set()
    try:
        with path.open("rb") as file:
            for number, text in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b""), 1):
                where = f"{path}, line {number}"
                if len(text) > _MAX_LINE_BYTES:
                    raise InvalidInput(f"{where}: longer than {_MAX_LINE_BYTES >> 20} MiB; split it")
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


def submitted_ahead(
    lines: Iterable[Line], submit: Callable[[Line], Submitted], count: int
) -> Iterator[tuple[Line, Submitted]]:
    """Submit up to `count` lines ahead; yield each line with its submission, in order.

    If `count` exceeds the batch size, a long answer leaves no slots of the batch idle.
    """
    waiting: deque[tuple[Line, Submitted]] = deque()
    for line in lines:
        waiting.append((line, submit(line)))
        if len(waiting) == count:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()
