"""Profiles a program operator by operator, with the timer of ExecuTorch's runtime."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.contracts.plan import Plan
from edgekit.contracts.target import OperatorTime, Phase, Profile
from edgekit.errors import ContextExceeded, InvalidInput, vendor_errors
from edgekit_executorch.layout import PROGRAM
from edgekit_executorch.program import LoadedProgram, pool_threads
from edgekit_executorch.quiet import quiet_output

_IN_DELEGATES = "DELEGATE_CALL"
_WRAPPERS = (
    "Method::execute",
    "Method::init",
    "Program::load_method",
    "OPERATOR_CALL",
)  # events around operators, which are listed themselves
_NUMBER = re.compile(r" #\d+$")


class _Event(NamedTuple):
    """One operator of the program, with its seconds in each step."""

    name: str
    is_inside: bool
    steps_s: list[float]


def profile(plan: Plan, files: Path, tokens: Sequence[int], decoded: int) -> Profile:
    """Prefill `tokens` in the planned chunks, then decode `decoded` tokens. The second of two runs is reported."""
    if not tokens or decoded < 1:
        raise InvalidInput("a profile needs at least one token, and one to decode")
    program = LoadedProgram(files / PROGRAM, min(plan.threads, os.cpu_count() or 1), profile=True)
    try:
        if len(tokens) + decoded > program.slots:
            raise ContextExceeded(len(tokens) + decoded, program.slots, "choose a shorter prompt")
        size = min(plan.chunk_tokens, program.chunk)
        chunks = range(0, len(tokens), size)
        for _ in range(2):
            for start in chunks:
                piece = tokens[start : start + size]
                program.append(piece, start, [len(piece) - 1])
            for index in range(decoded):
                program.append([tokens[-1]], len(tokens) + index, [0])
        events = list(_events(program))
    finally:
        program.close()
    total, first = len(chunks) + decoded, 2 * len(chunks) + decoded
    return Profile(
        threads=pool_threads() or 1,
        phases=(
            _phase("prefill", len(tokens), events, slice(total, first)),
            _phase("decode", decoded, events, slice(first, first + decoded)),
        ),
    )


def _events(program: LoadedProgram) -> Iterator[_Event]:
    """Yield every operator that was timed while methods ran."""
    with tempfile.TemporaryDirectory() as folder, vendor_errors("executorch"), quiet_output():
        from executorch.devtools import Inspector

        written = Path(folder) / "profile.etdp"
        program.write_profile(written)
        blocks: list[Any] = Inspector(etdump_path=str(written)).event_blocks
    for event in (event for block in blocks for event in block.events):
        if event.perf_data:
            yield _Event(event.name, bool(event.is_delegated_op), [each / 1e3 for each in event.perf_data.raw])


def _phase(name: Any, tokens: int, events: Sequence[_Event], steps: slice) -> Phase:
    """Sum the operators of one phase's steps by kind."""
    by_kind: dict[tuple[str, bool], list[float]] = {}
    total_s = 0.0
    for event in events:
        mine = event.steps_s[steps]
        if event.name == "Method::execute":
            total_s += sum(mine)
        elif event.name not in _WRAPPERS:
            kind = _NUMBER.sub("", event.name).removeprefix("native_call_")
            by_kind.setdefault((kind, event.is_inside), []).extend(mine)
    operators = [
        OperatorTime(name=kind, calls=len(times), total_s=sum(times), part_of=_IN_DELEGATES if is_inside else None)
        for (kind, is_inside), times in by_kind.items()
    ]
    ordered = sorted(operators, key=lambda operator: -operator.total_s)
    return Phase(name=name, tokens=tokens, steps=steps.stop - steps.start, total_s=total_s, operators=tuple(ordered))
