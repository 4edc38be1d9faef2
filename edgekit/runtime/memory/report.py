"""Predicted and measured memory of a runtime, by class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from edgekit.common.base import Frozen
from edgekit.common.footprint import Footprint, footprint, footprint_of, mapped_data_bytes
from edgekit.common.free_memory import Free, free_memory
from edgekit.common.units import show_bytes
from edgekit.contracts.plan import Estimate, FallbackStep
from edgekit.runtime.memory.admission import AdmittedConfig
from edgekit.runtime.memory.budget import BudgetClass
from edgekit.runtime.metrics import Metrics


class MemoryBaseline(NamedTuple):
    """The admitted configuration, and the private bytes of the process before and after the engine was loaded.

    They are 0 where this OS does not report them.
    """

    admitted: AdmittedConfig
    before: int
    loaded: int
    mapped_before_bytes: int | None = None
    with_draft: int | None = None  # after loading the draft model too


class MemoryClass(Frozen):
    """One class of memory. `measured_bytes` is None where this OS or engine cannot measure it separately."""

    name: str
    predicted_bytes: int
    measured_bytes: int | None = None
    most_bytes: int | None = None  # the peak so far, of a class that grows and shrinks

    @classmethod
    def of(cls, name: str, predicted: int, measured: int | None, most: int | None = None) -> MemoryClass:
        """Return the class of that name."""
        return cls(name=name, predicted_bytes=predicted, measured_bytes=measured, most_bytes=most)


class MemoryReport(Frozen):
    """Predicted and measured memory of one runtime."""

    classes: tuple[MemoryClass, ...]
    predicted: Estimate
    private_bytes: int | None  # measured, of the whole process
    allowed_bytes: int | None  # the limit for private bytes
    allowed_why: str
    formats_bytes: int  # taken from the budget for compiled formats, which nothing is reserved for
    states_allocated_bytes: int  # of running requests
    states_used_bytes: int  # the part that tokens fill
    ladder: tuple[FallbackStep, ...]  # the fallback steps that were taken at open
    free: Free | None
    counters: Footprint  # the counters of the OS

    @property
    def predicted_private_bytes(self) -> int:
        """The predicted peak of private bytes: the opening's, and what formats took since, up to their limit."""
        needed = self.predicted.private_bytes + self.formats_bytes
        return needed if self.allowed_bytes is None else min(needed, self.allowed_bytes)


def report(
    baseline: MemoryBaseline,
    metrics: Metrics,
    taken: Mapping[BudgetClass, int],
    format_bytes: int,
    workers: Iterable[int | None],
    *,
    reserves_kv: bool = False,
) -> MemoryReport:
    """Measure this process now and compare with the prediction. Takes milliseconds.

    Args:
        taken: the budget's bytes by class.
        format_bytes: the measured size of compiled formats.
        workers: the ids of this runtime's worker processes.
        reserves_kv: the engine took the whole cache when it was opened.
    """
    prefix_bytes = taken.get("prefixes", 0)
    adapter_bytes, formats_taken = taken.get("adapters", 0), taken.get("formats", 0)
    worker_bytes = sum(footprint_of(worker) or 0 for worker in workers if worker is not None)
    admitted, before, loaded = baseline.admitted, baseline.before, baseline.loaded
    predicted, now = admitted.estimate, footprint()
    used = round(metrics.states_bytes * (metrics.occupancy or 0.0))
    engine = max(0, loaded - before)
    draft = max(0, baseline.with_draft - loaded) if baseline.with_draft else None
    reserved = min(predicted.kv_bytes, engine) if reserves_kv else 0
    accounted = loaded + (draft or 0) + prefix_bytes + adapter_bytes + format_bytes
    accounted += metrics.queued_bytes + metrics.unread_bytes
    if not reserves_kv:
        accounted += used
    rest = None if now.private_bytes is None else max(0, now.private_bytes - accounted)
    runtime = before + engine - reserved if before else None
    runtime_bytes = predicted.runtime_bytes + predicted.private_weights_bytes
    first, last = baseline.mapped_before_bytes, mapped_data_bytes()
    mapped = None if first is None or last is None else max(0, last - first)
    caches = (reserved, None) if reserves_kv else (used, metrics.peak_kv_bytes)
    classes = (
        MemoryClass.of("mapped weights", predicted.mapped_weights_bytes, mapped),
        MemoryClass.of("runtime and private weights", runtime_bytes, runtime),
        MemoryClass.of("cache", predicted.kv_bytes, *caches),
        MemoryClass.of("activations", predicted.activation_bytes, rest),
        MemoryClass.of("opening", predicted.opening_bytes, 0),
        MemoryClass.of("draft", predicted.draft_bytes, draft),
        MemoryClass.of("prefixes", predicted.prefix_bytes, prefix_bytes),
        MemoryClass.of("adapters", predicted.adapter_bytes, adapter_bytes),
        MemoryClass.of("compiled formats", formats_taken, format_bytes),
        MemoryClass.of("workers, their own processes", taken.get("workers", 0), worker_bytes),
        MemoryClass.of("waiting requests", 0, metrics.queued_bytes),
        MemoryClass.of("unread answers", 0, metrics.unread_bytes),
    )
    return MemoryReport(
        classes=classes,
        predicted=predicted,
        private_bytes=now.private_bytes,
        allowed_bytes=admitted.allowed_bytes,
        allowed_why=admitted.allowed_why,
        formats_bytes=formats_taken,
        states_allocated_bytes=metrics.states_bytes,
        states_used_bytes=used,
        ladder=admitted.ladder,
        free=free_memory(),
        counters=now,
    )


def show(memory: MemoryReport) -> list[str]:
    """Format a report as lines of text: predicted and measured bytes side by side, then the fallback steps."""
    lines = [f"{'memory':<30} {'predicted':>10} {'measured':>10}"]
    total = MemoryClass.of("private, in all", memory.predicted_private_bytes, memory.private_bytes)
    for each in (*memory.classes, total):
        if each.predicted_bytes or each.measured_bytes:
            measured = "not known" if each.measured_bytes is None else show_bytes(each.measured_bytes)
            most = "" if each.most_bytes is None else f" (at most {show_bytes(each.most_bytes)} so far)"
            lines.append(f"  {each.name:<28} {show_bytes(each.predicted_bytes):>10} {measured:>10}{most}")
    if memory.allowed_bytes is not None:
        lines.append(f"  {'allowed':<28} {show_bytes(memory.allowed_bytes):>10} ({memory.allowed_why})")
    lines += [f"  given up: {step.change}, which saved {show_bytes(step.saved_bytes)}" for step in memory.ladder]
    return lines
