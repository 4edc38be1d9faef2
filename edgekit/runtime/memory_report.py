"""What a runtime was predicted to take and what it takes, by class, live. It counts; it decides nothing."""

from __future__ import annotations

from typing import NamedTuple

from edgekit.frozen import Frozen
from edgekit.plan import Estimate, Step
from edgekit.runtime.admission import Admitted
from edgekit.runtime.footprint import Footprint, Free, footprint, free_memory, mapped_data_bytes
from edgekit.runtime.metrics import Metrics
from edgekit.units import show_bytes


class Contract(NamedTuple):
    """What was agreed at open, and the process before and after the engine was loaded."""

    admitted: Admitted
    before: Footprint
    loaded: Footprint
    mapped_before_bytes: int | None = None
    drafted: Footprint | None = None  # after a draft model was loaded too


class Class(Frozen):
    """One class of memory. `measured_bytes` is None where this OS or engine does not tell it apart."""

    name: str
    predicted_bytes: int
    measured_bytes: int | None = None
    most_bytes: int | None = None  # that were measured so far, for a class that comes and goes


class MemoryReport(Frozen):
    """Predicted and measured memory of one runtime."""

    classes: tuple[Class, ...]
    predicted: Estimate
    private_bytes: int | None  # measured, of the whole process
    allowed_bytes: int | None  # private bytes that the contract allows
    allowed_why: str
    states_allocated_bytes: int  # promised to requests that run
    states_used_bytes: int  # of it, what the held tokens fill
    ladder: tuple[Step, ...]  # what was given up at open
    free: Free | None
    counters: Footprint  # the OS's, by its own names

    @property
    def predicted_private_bytes(self) -> int:
        return self.predicted.private_bytes


def report(contract: Contract, metrics: Metrics, *, adapter_bytes: int) -> MemoryReport:
    """As of now; it reads what the OS tells of this process, which takes milliseconds."""
    admitted, before, loaded = contract.admitted, contract.before, contract.loaded
    predicted, now = admitted.estimate, footprint()
    used = round(metrics.states_bytes * (metrics.occupancy or 0.0))
    engine = _difference(loaded.private_bytes, before.private_bytes)
    draft = _difference(contract.drafted.private_bytes, loaded.private_bytes) if contract.drafted else None
    accounted = (loaded.private_bytes or 0) + (draft or 0) + used + metrics.prefix_bytes + adapter_bytes
    rest = None if now.private_bytes is None else max(0, now.private_bytes - accounted)
    runtime = None if before.private_bytes is None else before.private_bytes + (engine or 0)
    classes = (
        Class(
            name="mapped weights",
            predicted_bytes=predicted.mapped_weights_bytes,
            measured_bytes=_difference(mapped_data_bytes(), contract.mapped_before_bytes),
        ),
        Class(
            name="runtime and private weights",
            predicted_bytes=predicted.runtime_bytes + predicted.private_weights_bytes,
            measured_bytes=runtime,
        ),
        Class(
            name="cache",
            predicted_bytes=predicted.kv_bytes,
            measured_bytes=used,
            most_bytes=metrics.most_held_bytes,
        ),
        Class(name="activations", predicted_bytes=predicted.activation_bytes, measured_bytes=rest),
        Class(name="draft", predicted_bytes=predicted.draft_bytes, measured_bytes=draft),
        Class(name="prefixes", predicted_bytes=predicted.prefix_bytes, measured_bytes=metrics.prefix_bytes),
        Class(name="adapters", predicted_bytes=predicted.adapter_bytes, measured_bytes=adapter_bytes),
    )
    return MemoryReport(
        classes=classes,
        predicted=predicted,
        private_bytes=now.private_bytes,
        allowed_bytes=admitted.allowed_bytes,
        allowed_why=admitted.allowed_why,
        states_allocated_bytes=metrics.states_bytes,
        states_used_bytes=used,
        ladder=admitted.ladder,
        free=free_memory(),
        counters=now,
    )


def show(found: MemoryReport) -> list[str]:
    """As lines that a person reads: predicted beside measured, and what was given up."""
    lines = [f"{'memory':<28} {'predicted':>10} {'measured':>10}"]
    total = Class(
        name="private, in all", predicted_bytes=found.predicted_private_bytes, measured_bytes=found.private_bytes
    )
    for one in (*found.classes, total):
        if one.predicted_bytes or one.measured_bytes:
            measured = "not known" if one.measured_bytes is None else show_bytes(one.measured_bytes)
            most = "" if one.most_bytes is None else f" (at most {show_bytes(one.most_bytes)})"
            lines.append(f"  {one.name:<26} {show_bytes(one.predicted_bytes):>10} {measured:>10}{most}")
    if found.allowed_bytes is not None:
        lines.append(f"  {'allowed':<26} {show_bytes(found.allowed_bytes):>10} ({found.allowed_why})")
    lines += [f"  given up: {step.change}, which saved {show_bytes(step.saved_bytes)}" for step in found.ladder]
    return lines


def _difference(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else max(0, now - before)
