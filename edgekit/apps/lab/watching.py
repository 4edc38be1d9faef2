"""Shows a run: one row per device on a terminal, otherwise a line per event."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic

from edgekit.apps.lab.matrix import Lab
from edgekit.apps.lab.run import EntryEvent, Watcher
from edgekit.apps.lab.store import LabStore


@contextmanager
def watching(lab: Lab, store: LabStore, run: str) -> Iterator[Watcher]:
    """Show a run on stderr during the block."""
    if sys.stderr.isatty():
        with _table(lab, store, run) as watch:
            yield watch
    else:
        yield _line


def _line(event: EntryEvent) -> None:
    entry = f"  {event.entry.id}  {event.entry.workload}, {event.entry.artifact}" if event.entry else ""
    sys.stderr.write(f"{event.device}: {event.state}{entry}{': ' + event.why if event.why else ''}\n")
    sys.stderr.flush()


@contextmanager
def _table(lab: Lab, store: LabStore, run: str) -> Iterator[Watcher]:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    counts = {device.name: Counter(store.states(run, device.name)) for device in lab.devices}
    at: dict[str, tuple[str, float]] = {}
    lock = Lock()

    def drawn() -> Table:
        table = Table("device", "done", "waiting", "failed", "lost", "at", "for")
        with lock:
            for name, states in counts.items():
                what, since = at.get(name, ("", monotonic()))
                lost = states["lost"] + states["quarantined"]
                row = (states["done"], states["waiting"], states["failed"], lost)
                table.add_row(name, *map(str, row), what, f"{monotonic() - since:.0f} s" if what else "")
        return table

    with Live(get_renderable=drawn, console=Console(stderr=True), refresh_per_second=2) as live:

        def watch(event: EntryEvent) -> None:
            now = Counter(store.states(run, event.device))
            with lock:
                counts[event.device] = now
                at.pop(event.device, None)
                if event.state == "running" and event.entry is not None:
                    at[event.device] = (
                        f"{event.entry.workload}, {event.entry.artifact.rsplit('/', 1)[-1]}",
                        monotonic(),
                    )
            if event.why:
                live.console.print(f"{event.device}: {event.state}: {event.why}", markup=False, highlight=False)

        yield watch
