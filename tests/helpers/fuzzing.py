"""Damaged files, and the check that none does worse than an error in one line.

A `Fuzzed` format has whole files and reads them as the product does. Each case damages one file. It fails on any
exception that is not edgekit's own, on a message of several lines, on more than a second of processor time, and on
memory beyond the file's size plus 64 MB.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Protocol
from unittest.mock import patch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would count as mapped memory

from edgekit.common.files import file_sha256
from edgekit.common.sealed_json import add_seal
from edgekit.errors import DoesNotFit, EdgekitError

MOST_SECONDS = 1.0
MOST_EXTRA_BYTES = 64_000_000
_WORDS = (0, 1, 2, 3, 4, 7, 8, 9, 10, 12, 13, 31, 32, 33, 255, 4096, 1 << 16, 1 << 20, 1 << 24, 1 << 31, (1 << 32) - 1)
_LONG = (*_WORDS, 1 << 32, 1 << 40, 1 << 61, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_ODD = (
    None, True, False, -1, 0, 1, 2, 3, 7, 1000, 65_537, 10**9, 10**12, 1 << 63, 1 << 80, 10**400, -0.0, 0.5, 1e-300,
    1e308, "", "x", "\n", "\0", "\ud800", "../x", "/etc/passwd", "é" * 300, "x" * 20_000, [], [0], [-1, 1e308], {},
    {"x": 0}, [[]], "default", "yarn", "longrope", "cpu", "onnx", "1", "a" * 64,
)  # fmt: skip
_TWICE = "\ue000"  # marks a key that is written as the one before it

_MOST_MEMBERS = 64  # of an object whose members are fields; others are vocabularies
_OTHER_FIELDS = 10  # what files other than JSON count as

Paths = list[tuple[str | int, ...]]


class Fuzzed(Protocol):
    """A stored format: whole files, the damage that suits each, and everything that reads them."""

    wholes: Mapping[Path, bytes]

    def damaged(self, path: Path, whole: bytes, draw: random.Random) -> bytes: ...

    def read(self, path: Path) -> None: ...


def damaged_bytes(whole: bytes, draw: random.Random, header: int = 12_000) -> bytes:
    """One to four changes, most of them in the first `header` bytes."""
    data = bytearray(whole)
    header = len(whole) if draw.random() < 0.05 else min(len(whole), header)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(max(1, min(header, len(data))))
        if draw.random() < 0.3:
            at = draw.randrange(min(600, max(1, len(data))))  # counts, keys and sizes
        match draw.randrange(7):
            case 0:
                data[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                data[at : at + 1] = bytes([(data[at] ^ 1 << draw.randrange(8)) if at < len(data) else 0])
            case 2:
                data[at : at + 4] = struct.pack("<I", draw.choice(_WORDS))
            case 3:
                data[at : at + 8] = struct.pack("<Q", draw.choice(_LONG))
            case 4:
                del data[at : at + draw.choice((1, 4, 8, 100))]
            case 5:
                other = draw.randrange(max(1, len(data)))
                data[at:at] = data[other : other + draw.choice((1, 4, 8, 64, 1000))]
            case _:
                del data[at + draw.randrange(max(1, len(data) - at)) :]
    return bytes(data)


def fields_of(value: Any) -> list[Paths]:
    """Return where each field of a JSON value stands; the items of a list or of a large object are one field."""
    found: dict[tuple[str | int, ...], Paths] = {}
    places: list[tuple[Any, tuple[str | int, ...], tuple[str | int, ...]]] = [(value, (), ())]
    for inner, path, field in places:
        found.setdefault(field, []).append(path)
        inside = list(inner.items() if isinstance(inner, dict) else enumerate(inner if isinstance(inner, list) else ()))
        is_one = isinstance(inner, list) or len(inside) > _MOST_MEMBERS
        places += [(each, (*path, key), (*field, "*" if is_one else key)) for key, each in inside]
    return list(found.values())


def damaged_fields(
    plain: dict[str, Any], draw: random.Random, fields: list[Paths] | None = None, turn: int | None = None
) -> str:
    """JSON with one or two fields, the `turn`-th first, changed in value, type or size, absent, renamed or doubled."""
    value = json.loads(json.dumps(plain))
    fields = fields or fields_of(plain)
    first = draw.choice(fields) if turn is None else fields[turn % len(fields)]
    for field in (first, draw.choice(fields))[: draw.randint(1, 2)]:
        *parents, last = draw.choice(field) or ("version",)
        inner = value
        try:
            for key in parents:
                inner = inner[key]
            _damage_field(inner, last, draw)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took its place away
    return json.dumps(value, indent=1).replace(json.dumps(_TWICE)[1:-1], "")


def _damage_field(inner: Any, last: str | int, draw: random.Random) -> None:
    old = inner[last]
    match draw.randrange(8):
        case 0 | 1 | 2:
            inner[last] = deepcopy(draw.choice(_ODD))  # a later change may be inside it
        case 3:
            inner[last] = _resized(old, draw)
        case 4:
            del inner[last]
        case 5 if isinstance(inner, list):
            inner.insert(last, old)
        case 5:
            inner[f"{last}{_TWICE}"] = deepcopy(draw.choice((old, *_ODD)))
        case 6 if isinstance(inner, dict):
            inner[draw.choice((f"{last}2", str(last).upper(), "x" * 5000))] = inner.pop(last)
        case _:
            inner[last] = [old] if draw.random() < 0.5 else {"x": old}


def _resized(old: Any, draw: random.Random) -> Any:
    """Another size: never so large that the fuzzer's memory hides the reader's."""
    if isinstance(old, bool) or old is None:
        return not old
    if isinstance(old, int):
        return draw.choice((-old, old * 2, old + 1, old - 1, old << 20, old << 40))
    if isinstance(old, float):
        return draw.choice((-old, old * 1e9, old * 1e-9, int(old)))
    if isinstance(old, str):
        return draw.choice((old * 2, old[:-1], old.upper(), old * (3000 if len(old) < 100 else 3)))
    if isinstance(old, list):
        return draw.choice((old * 2, old[:-1], old * (30 if len(old) < 100 else 3)))
    return {**old, **{f"{key}{number}": inner for key, inner in old.items() for number in range(draw.choice((1, 30)))}}


class JsonFormat:
    """Damage to fields of JSON and of headers of safetensors or, in part of the cases and in other files, to bytes."""

    def __init__(self) -> None:
        self.wholes: dict[Path, bytes] = {}
        self._plain: dict[Path, tuple[dict[str, Any], list[Paths]]] = {}
        self._turns: dict[Path, int] = {}

    def add(self, path: Path) -> None:
        """Damage `path` too."""
        self.wholes[path] = path.read_bytes()

    def seal_with(self, path: Path, manifest: Path) -> None:
        """Write `manifest` with the size and hash that `path` has now, as an attacker would."""
        if path == manifest:
            return
        value = json.loads(self.wholes[manifest])
        del value["seal"]
        fact = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        value["files"][path.relative_to(manifest.parent).as_posix()] = fact
        manifest.write_bytes(add_seal((json.dumps(value, indent=1) + "\n").encode()))

    def damaged(self, path: Path, whole: bytes, draw: random.Random) -> bytes:
        if path.suffix == ".safetensors" and draw.random() < 0.5:
            length = int.from_bytes(whole[:8], "little")
            header = damaged_fields(json.loads(whole[8 : 8 + length]), draw).encode()
            return len(header).to_bytes(8, "little") + header + whole[8 + length :]
        if path.suffix != ".json" or draw.random() < 0.3:
            return damaged_bytes(whole, draw)
        if path not in self._plain:
            value = json.loads(whole)
            self._plain[path] = value, [field for field in fields_of(value) if field[0][:1] != ("seal",)]
        plain, fields = self._plain[path]
        turn = self._turns[path] = self._turns.get(path, draw.randrange(len(fields))) + 1
        if "seal" not in plain:
            return damaged_fields(plain, draw, fields, turn).encode()
        unsealed = {key: value for key, value in plain.items() if key != "seal"}
        text = damaged_fields(unsealed, draw, fields, turn) + "\n"
        return add_seal(text.encode()) if text.endswith("\n}\n") else text.encode()


def outcome(read: Callable[[], None], largest: int = 0) -> str:
    """Read once and return the name of the error, or "read"; raises on any other ending."""
    began, message, code = process_time(), "", 2
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read()
        kind = "read"
    except EdgekitError as error:
        kind, message, code = type(error).__name__, str(error), error.exit_code
    took = process_time() - began
    grew = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert code == 2 or kind == DoesNotFit.__name__, f"{kind} has the exit code {code}"
    assert "\n" not in message and len(message) < 5000, message
    assert took < MOST_SECONDS, f"took {took:.2f} s"
    assert grew < MOST_EXTRA_BYTES + largest, f"grew by {grew / 1e6:.0f} MB"
    return kind


def outcomes(form: Fuzzed, count: int, seed: int, kept: Path) -> Iterator[str]:
    """The outcome of each of `count` damaged files; one that fails is copied into `kept`."""
    with patch.object(os, "fsync", lambda handle: None):  # what is read does not depend on it, and it takes longest
        yield from _outcomes(form, count, random.Random(seed), kept)


def _outcomes(form: Fuzzed, count: int, draw: random.Random, kept: Path) -> Iterator[str]:
    for path, whole in form.wholes.items():
        path.write_bytes(whole)
    largest = max(map(len, form.wholes.values()))
    for path in form.wholes:  # what is loaded once is loaded now
        form.read(path)
    turns = Counter({path: _fields_in(path, whole) for path, whole in form.wholes.items()})
    order: list[Path] = []
    for number in range(count):
        order = order or draw.sample(list(form.wholes), turns.total(), counts=turns.values())
        path = order.pop()
        data = form.damaged(path, form.wholes[path], draw)
        path.write_bytes(data)
        try:
            kind = outcome(lambda path=path: form.read(path), largest)  # type: ignore[misc]
        except BaseException as error:  # a panic of a vendor's library too
            failed = kept / f"failed-{number}-{path.name}"
            failed.write_bytes(data)
            raise AssertionError(f"{failed}: {type(error).__name__}: {error}") from error
        yield kind
        path.write_bytes(form.wholes[path])


def _fields_in(path: Path, whole: bytes) -> int:
    return len(fields_of(json.loads(whole))) if path.suffix == ".json" else _OTHER_FIELDS


def mapped_bytes() -> int:
    """Bytes of address space that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def say(line: str) -> None:
    """A line on standard output, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def fuzz(name: str, form: Fuzzed, count: int, seed: int, kept: Path, extra_bytes: int) -> None:
    """Read `count` damaged files and say what became of them.

    The process may map no more than the largest file and `extra_bytes` for a thousand files, so that an allocation
    that is too large fails where it is made.
    """
    seen: Counter[str] = Counter()
    began, slowest, most, resident = perf_counter(), 0.0, 0, 0
    largest = max(map(len, form.wholes.values())) + 4000
    last = process_time()
    for number, kind in enumerate(outcomes(form, count, seed, kept)):
        seen[kind] += 1
        if number > 1000:  # what is loaded once is loaded by now
            slowest = max(slowest, process_time() - last)
            most = max(most, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident)
        if number % 1000 == 0:
            # Set anew from time to time: libraries keep a little of each file.
            limit = mapped_bytes() + largest + extra_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            faulthandler.dump_traceback_later(600, exit=True)  # where the thousand hangs
        if number and number % 50_000 == 0:
            say(f"{name}: {number:,} after {perf_counter() - began:.0f} s: {dict(seen)}")
        last = process_time()
    faulthandler.cancel_dump_traceback_later()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    say(
        f"{name}: {count:,} files in {perf_counter() - began:.0f} s: {dict(seen)}; slowest {slowest * 1000:.0f} ms, "
        f"resident memory grew by at most {most / 1e6:.1f} MB in a thousand files"
    )


def run(forms: Mapping[str, Callable[[Path], Fuzzed]], description: str) -> int:
    """The command line of a fuzzer; `forms` make a format in a folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--format", choices=list(forms), action="append", help="only this one; may be given again")
    parser.add_argument("--count", type=int, default=100_000, help="damaged files of each format")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for name in options.format or forms:
        folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        with_threads = MOST_EXTRA_BYTES if name == "gguf" else 1 << 30
        form = forms[name](folder)
        count = min(options.count, getattr(form, "most_cases", options.count))
        fuzz(name, form, count, options.seed, folder.parent, with_threads)
    return 0
