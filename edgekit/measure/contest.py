"""From artifacts, a workload and peers to measurements of this machine: builds the arms and runs the bench."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgekit.artifact import Artifact, open_artifact
from edgekit.detect import readings
from edgekit.detect.surroundings import these
from edgekit.errors import InvalidInput
from edgekit.interfaces import Progress
from edgekit.measure.bench import LOADS, Bench, Contender
from edgekit.measure.conditions import conditions
from edgekit.measure.energy import meter
from edgekit.measure.entrants import Opening, entrant_of
from edgekit.measure.machine import Machine
from edgekit.measure.measurement import Conditions, Measurement
from edgekit.measure.peers.entering import known_peer, peer_of, weights_of
from edgekit.measure.prompts import Encode
from edgekit.measure.workload import Workload
from edgekit.runtime.text import Codec, read_codec


def bench(
    artifacts: Sequence[str | Path],
    workload: Workload,
    *,
    opening: Opening | None = None,
    against: Sequence[str] = (),
    peer_python: str | None = None,
    weights: Path | None = None,
    loads: int = LOADS,
    machine: Machine | None = None,
    progress: Progress,
) -> list[Measurement]:
    """Every artifact, then every peer on the integers of the first, each on the same workload."""
    if not artifacts:
        raise InvalidInput("name at least one artifact")
    opened = _opening(opening or Opening(), workload)
    contenders = [_contender(path, opened) for path in artifacts]
    names = [contender.entrant.arm.name for contender in contenders]
    if len(set(names)) < len(names):
        contenders = [_contender(path, opened, Path(path).name) for path in artifacts]
    contenders += _peers(open_artifact(artifacts[0]), contenders[0], against, peer_python, weights)
    place = machine or Machine()
    found = Bench(
        contenders,
        workload,
        place,
        meter(),
        lambda: here(place),
        loads=loads,
        progress=progress,
    ).run()
    place.remember()
    return found


def here(machine: Machine) -> Conditions:
    """What is around now; measures how fast memory is read."""
    ask = these(measure_again=True)
    speed = ask.speed(machine.cores, readings.last_cache_bytes(ask.read), ask.physical_memory() or 1 << 30)
    return conditions(canary_s=machine.best_s, cores=machine.cores, read_gb_s=round(speed.read_gb_s, 2))


def _opening(given: Opening, workload: Workload) -> Opening:
    """As the workload wants it, unless asked otherwise."""
    if given.context is not None or given.window is not None:
        return given
    return given._replace(context=workload.context, window=workload.window, sinks=given.sinks or workload.sinks)


def _contender(path: str | Path, opening: Opening, name: str | None = None) -> Contender:
    artifact = open_artifact(path)
    return Contender(entrant_of(path, opening, name), artifact.plan.model, _encode(read_codec(artifact.folder)))


def _encode(codec: Codec) -> Encode:
    def encode(text: str, begins: bool) -> list[int]:
        return codec.encode(text, add_special_tokens=begins)

    return encode


def _peers(
    artifact: Artifact, first: Contender, names: Sequence[str], python: str | None, given: Path | None
) -> list[Contender]:
    for name in names:
        known_peer(name)
    if not names:
        return []
    arm = first.entrant.arm
    for option, is_given in (
        ("--window", arm.window is not None),
        ("--sequences", arm.sequences > 1),
        ("--adapter", arm.adapter is not None),
        ("--prefixes", arm.prefix_bytes > 0),
    ):
        if is_given:
            raise InvalidInput(f"{option}: peers are not opened so here; bench against them without it")
    weights = weights_of(artifact, given)
    context = first.entrant.arm.context
    return [first._replace(entrant=peer_of(name, artifact, weights, context=context, python=python)) for name in names]
