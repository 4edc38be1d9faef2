"""Benchmarks artifacts and peers on this machine: prepares the subjects and runs the workload on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgekit import Artifact, OpenOptions, open_artifact
from edgekit.apps.bench.artifact_subjects import predicted_s, subject_of_artifact
from edgekit.apps.bench.conditions import conditions
from edgekit.apps.bench.machine import CONTENDED_SHARE, Machine
from edgekit.apps.bench.measurement import Conditions, Measurement
from edgekit.apps.bench.peers.subjects import known_peer, peer_of, weights_of
from edgekit.apps.bench.subject import Subject
from edgekit.apps.bench.trials import LOADS, BenchRun
from edgekit.apps.bench.workload import Workload
from edgekit.common.machine_speed import last_cache_bytes, machine_speed, physical_memory
from edgekit.common.progress import Progress
from edgekit.errors import InvalidInput

_OPENING_S = 1.5  # of one process, for the estimate before a run


def bench(
    artifacts: Sequence[str | Path],
    workload: Workload,
    *,
    opening: OpenOptions | None = None,
    against: Sequence[str] = (),
    peer_python: str | None = None,
    loads: int = LOADS,
    machine: Machine | None = None,
    progress: Progress,
) -> list[Measurement]:
    """Measure every artifact, and every peer on the integers of the first one, on the same workload.

    Args:
        opening: how artifacts are opened; without context and window, the workload's apply.
        against: names of peers, e.g. "llama.cpp".
        peer_python: the Python that has the peers installed; None: this one.
        loads: fresh processes per subject.
    """
    if not artifacts:
        raise InvalidInput("name at least one artifact")
    opened = _opening(opening or OpenOptions(), workload)
    subjects = [subject_of_artifact(path, opened) for path in artifacts]
    names = [subject.info.name for subject in subjects]
    if len(set(names)) < len(names):
        subjects = [subject_of_artifact(path, opened, Path(path).name) for path in artifacts]
    subjects += _peers(open_artifact(artifacts[0]), subjects[0], against, peer_python)
    machine = machine or Machine()
    measurements = BenchRun(
        subjects,
        workload,
        machine,
        lambda: measure_conditions(machine),
        loads=loads,
        is_busy=_is_busy(machine.others_share()),
        progress=progress,
    ).run()
    machine.remember()
    return measurements


def expectations(
    artifacts: Sequence[str | Path], workloads: Sequence[Workload], loads: int = LOADS, machine: Machine | None = None
) -> list[str]:
    """Return notes to show before a run: its predicted duration, and a warning if the machine is busy."""
    plans = [open_artifact(path).plan for path in artifacts]
    seconds = sum(predicted_s(plan, workload, loads) for plan in plans for workload in workloads)
    seconds += _OPENING_S * len(plans) * len(workloads) * loads
    names = ", ".join(workload.name for workload in workloads)
    lines = [f"workload {names}: about {_duration(seconds)} on an idle machine"]
    busy = busy_note(machine or Machine())
    return [*lines, busy] if busy is not None else lines


def busy_note(machine: Machine) -> str | None:
    """Return a warning if other programs use this machine now."""
    share = machine.others_share()
    if share is None or not _is_busy(share):
        return None
    return (
        f"this machine is busy: other programs use {share:.0%} of its cores; disturbed figures are marked with ~, "
        "and trials are not repeated"
    )


def _is_busy(others_share: float | None) -> bool:
    return others_share is not None and others_share > CONTENDED_SHARE


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def measure_conditions(machine: Machine) -> Conditions:
    """Return the machine's current conditions; this measures reading memory and multiplying matrices."""
    speed = machine_speed(machine.cores, last_cache_bytes(), physical_memory() or 1 << 30, again=True)
    reads, multiplies = round(speed.read_gb_s, 2), round(speed.fp32_tflops, 4)
    return conditions(canary_s=machine.best_s, cores=machine.cores, read_gb_s=reads, fp32_tflops=multiplies)


def _opening(given: OpenOptions, workload: Workload) -> OpenOptions:
    """Complete the options by the workload's context and window, unless the caller gave one of them."""
    if given.context is not None or given.window is not None:
        return given
    limits = {"context": workload.context, "window": workload.window, "sinks": given.sinks or workload.sinks}
    return given.model_copy(update=limits)


def _peers(artifact: Artifact, first: Subject, names: Sequence[str], python: str | None) -> list[Subject]:
    for name in names:
        known_peer(name)
    if not names:
        return []
    info = first.info
    for option, is_given in (
        ("--window", info.window is not None),
        ("--sequences", info.sequences > 1),
        ("--prefixes", info.prefix_bytes > 0),
    ):
        if is_given:
            raise InvalidInput(f"{option}: peers cannot be opened with it; bench against them without it")
    weights = weights_of(artifact)
    return [peer_of(name, artifact, weights, context=info.context, python=python) for name in names]
