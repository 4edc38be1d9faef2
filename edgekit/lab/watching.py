"""How a run is watched: one row a device on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic

from edgekit.lab.matrix import Lab
from edgekit.lab.run import Told, Watcher
from edgekit.lab.store import Store


@contextmanager
def watching(lab: Lab, store: Store, run: str) -> Iterator[Watcher]:
    """A watcher for the length of the block; on stderr."""
    if sys.stderr.isatty():
        with _table(lab, store, run) as watch:
            yield watch
    else:
        yield _line


def _line(told: Told) -> None:
    cell = f"  {told.cell.id}  {told.cell.workload}, {told.cell.artifact}" if told.cell else ""
    sys.stderr.write(f"{told.device}: {told.state}{cell}{': ' + told.why if told.why else ''}\n")
    sys.stderr.flush()


@contextmanager
def _table(lab: Lab, store: Store, run: str) -> Iterator[Watcher]:
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

        def watch(told: Told) -> None:
            found = Counter(store.states(run, told.device))
            with lock:
                counts[told.device] = found
                at.pop(told.device, None)
                if told.state == "running" and told.cell is not None:
                    at[told.device] = (f"{told.cell.workload}, {told.cell.artifact.rsplit('/', 1)[-1]}", monotonic())
            if told.why:
                live.console.print(f"{told.device}: {told.state}: {told.why}", markup=False, highlight=False)

        yield watch
