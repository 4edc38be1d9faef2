"""Where a program's time goes, operator by operator, as its own runtime measured it. Knows nothing of plans."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.errors import InvalidInput, vendor_errors
from edgekit_executorch.hushed import hushed
from edgekit_executorch.program import LoadedProgram


class OperatorTime(NamedTuple):
    """One kind of operator in one program."""

    name: str
    calls: int
    total_s: float
    inside_backend: bool  # part of a delegate's time, which is listed as DELEGATE_CALL


class Profile(NamedTuple):
    """A run under the clock; `total_s` is the whole method's, and delegates contain their own operators."""

    method_s: float
    operators: tuple[OperatorTime, ...]  # most expensive first


def profile(path: Path, tokens: Sequence[int], *, chunk_tokens: int, decoded: int = 16, threads: int = 1) -> Profile:
    """Prefill `tokens` in chunks, then decode, with every operator of the program at `path` timed."""
    if not tokens or chunk_tokens < 1:
        raise InvalidInput("a profile needs at least one token and chunks of at least one")
    program = LoadedProgram(path, threads, profile=True)
    try:
        if len(tokens) + decoded > program.slots:
            raise InvalidInput(f"{len(tokens) + decoded} tokens; the program holds {program.slots}")
        size = min(chunk_tokens, program.chunk)
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            program.forward(piece, start, [len(piece) - 1])
        for index in range(decoded):
            program.forward([tokens[-1]], len(tokens) + index, [0])
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "profile.etdp"
            program.write_profile(written)
            return _read(written)
    finally:
        program.close()


def _read(path: Path) -> Profile:
    with vendor_errors("executorch"), hushed():
        from executorch.devtools import Inspector

        blocks: list[Any] = Inspector(etdump_path=str(path)).event_blocks
    totals: dict[tuple[str, bool], list[float]] = {}
    method_s = 0.0
    for event in (event for block in blocks for event in block.events):
        seconds = [raw / 1e3 for raw in event.perf_data.raw] if event.perf_data else []  # milliseconds
        if event.name == "Method::execute":
            method_s += sum(seconds)
        elif event.name not in ("Method::init", "Program::load_method", "OPERATOR_CALL"):
            totals.setdefault((event.name, bool(event.is_delegated_op)), []).extend(seconds)
    found = [OperatorTime(name, len(times), sum(times), inside) for (name, inside), times in totals.items() if times]
    return Profile(method_s, tuple(sorted(found, key=lambda operator: -operator.total_s)))
