"""What a lab has found, in one SQLite file that survives a power cut: every result is committed on its own.

It knows no devices: cells go in, and what became of each attempt comes out.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from edgekit.artifact import open_artifact
from edgekit.errors import DamagedArtifact, InvalidInput, OutOfSpace, UnknownName, clip
from edgekit.files import free_bytes
from edgekit.lab.matrix import Cell, Lab
from edgekit.measure.measurement import Measurement
from edgekit.plan import Plan

Outcome = Literal["measured", "failed", "infra_lost", "disturbed", "stopped"]
State = Literal["waiting", "running", "done", "failed", "lost", "quarantined"]
_VERSION, _PAGE_BYTES = 1, 1 << 20
_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
  id TEXT PRIMARY KEY, lab TEXT NOT NULL, begun_at REAL NOT NULL, ended_at REAL, spec TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS cells (
  run TEXT NOT NULL REFERENCES runs(id), id TEXT NOT NULL, place INTEGER NOT NULL, device TEXT NOT NULL,
  state TEXT NOT NULL, cell TEXT NOT NULL, PRIMARY KEY (run, id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS queue ON cells (run, device, state, place);
CREATE TABLE IF NOT EXISTS attempts (
  run TEXT NOT NULL, cell TEXT NOT NULL, number INTEGER NOT NULL, begun_at REAL NOT NULL, beat_at REAL NOT NULL,
  ended_at REAL, outcome TEXT, why TEXT NOT NULL DEFAULT '', PRIMARY KEY (run, cell, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS results (
  run TEXT NOT NULL, cell TEXT NOT NULL, measurement TEXT NOT NULL, received_at REAL NOT NULL,
  PRIMARY KEY (run, cell)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS plans (artifact_sha256 TEXT PRIMARY KEY, plan TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS baselines (lab TEXT PRIMARY KEY, run TEXT NOT NULL);
"""


class RunInfo(NamedTuple):
    """One line of a lab's history."""

    id: str
    lab: str
    begun_at: float
    ended_at: float | None
    states: dict[str, int]


class Attempt(NamedTuple):
    """One try at a cell."""

    cell: str
    number: int
    begun_at: float
    ended_at: float | None
    outcome: str | None
    why: str


class Store:
    """Safe to use from several threads: one connection, one transaction at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = path, Lock()
        try:
            self._base = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
            self._base.execute("PRAGMA journal_mode=WAL")
            found = self._base.execute("PRAGMA user_version").fetchone()[0]
            if found > _VERSION:
                raise InvalidInput(f"{path}: was written by a newer edgekit (version {found}); upgrade edgekit")
            with self._changing() as base:
                for statement in _SCHEMA.split(";\n"):
                    base.execute(statement)
                base.execute(f"PRAGMA user_version={_VERSION}")
        except sqlite3.DatabaseError as error:
            raise DamagedArtifact(f"{path}: is no store of lab runs: {error}; move it away") from error

    @contextmanager
    def _changing(self, *, at_once: bool = True) -> Iterator[sqlite3.Connection]:
        """All or nothing, and on the disk before it returns; not `at_once`: with the next change that is."""
        with self._lock:
            self._base.execute(f"PRAGMA synchronous={'FULL' if at_once else 'NORMAL'}")
            try:
                self._base.execute("BEGIN IMMEDIATE")
                yield self._base
                self._base.execute("COMMIT")
            except BaseException as error:
                if self._base.in_transaction:  # SQLite has ended it by itself where the disk was full
                    self._base.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                    raise OutOfSpace(str(self.path), _PAGE_BYTES, free_bytes(self.path)) from error
                raise

    def _rows(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._base.execute(question, values).fetchall()

    def begin(self, run: str, lab: Lab, cells: Iterable[Cell], now: float) -> None:
        """A run, all its cells and the plans of their artifacts, or nothing."""
        folders: set[str] = set()

        def rows() -> Iterator[tuple[str, str, int, str, str]]:
            for place, cell in enumerate(cells):
                folders.add(cell.artifact)
                yield run, cell.id, place, cell.device, cell.model_dump_json()

        with self._changing() as base:
            base.execute("INSERT INTO runs VALUES (?, ?, ?, NULL, ?)", (run, lab.name, now, lab.model_dump_json()))
            base.executemany("INSERT INTO cells VALUES (?, ?, ?, ?, 'waiting', ?)", rows())
            for folder in sorted(folders):
                found = open_artifact(Path(folder))
                base.execute("INSERT OR IGNORE INTO plans VALUES (?, ?)", (found.sha256, found.plan.to_json()))

    def reopen(self, run: str, now: float) -> int:
        """After a crash: attempts that nobody ended were stopped, and their cells wait again. How many there were."""
        self.info(run)
        with self._changing() as base:
            stopped = base.execute(
                "UPDATE attempts SET ended_at=?, outcome='stopped', why='the lab stopped' "
                "WHERE run=? AND ended_at IS NULL",
                (now, run),
            ).rowcount
            base.execute(
                "UPDATE cells SET state='waiting' WHERE run=? AND state IN ('running', 'quarantined', 'lost')", (run,)
            )
            base.execute("UPDATE runs SET ended_at=NULL WHERE id=?", (run,))
        return stopped

    def take(self, run: str, device: str, now: float) -> tuple[Cell, int] | None:
        """The device's next cell and the number of this attempt at it; None where nothing waits."""
        with self._changing(at_once=False) as base:  # after a power cut the cell waits again, as it should
            row = base.execute(
                "SELECT id, cell FROM cells WHERE run=? AND device=? AND state='waiting' ORDER BY place LIMIT 1",
                (run, device),
            ).fetchone()
            if row is None:
                return None
            (before,) = base.execute("SELECT count(*) FROM attempts WHERE run=? AND cell=?", (run, row[0])).fetchone()
            base.execute(
                "INSERT INTO attempts (run, cell, number, begun_at, beat_at) VALUES (?, ?, ?, ?, ?)",
                (run, row[0], before + 1, now, now),
            )
            base.execute("UPDATE cells SET state='running' WHERE run=? AND id=?", (run, row[0]))
        return Cell.model_validate_json(row[1]), before + 1

    def beat(self, run: str, cell: str, number: int, now: float) -> None:
        """The attempt is alive."""
        with self._changing(at_once=False) as base:
            base.execute("UPDATE attempts SET beat_at=? WHERE run=? AND cell=? AND number=?", (now, run, cell, number))

    def end(
        self, run: str, cell: str, number: int, outcome: Outcome, state: State, now: float, why: str = "",
        result: Measurement | None = None,
    ) -> bool:  # fmt: skip
        """An attempt has ended, with its result where there is one; no: the cell had a result already, and keeps it."""
        with self._changing() as base:
            base.execute(
                "UPDATE attempts SET ended_at=?, outcome=?, why=? "
                "WHERE run=? AND cell=? AND number=? AND ended_at IS NULL",
                (now, outcome, why[:2000], run, cell, number),
            )
            is_new = True
            if result is not None:
                is_new = (
                    base.execute(
                        "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", (run, cell, result.model_dump_json(), now)
                    ).rowcount
                    == 1
                )
            base.execute("UPDATE cells SET state=? WHERE run=? AND id=? AND state != 'done'", (state, run, cell))
        return is_new

    def outcomes(self, run: str, cell: str) -> list[str]:
        """How the attempts at a cell ended, in order."""
        rows = self._rows("SELECT outcome FROM attempts WHERE run=? AND cell=? ORDER BY number", run, cell)
        return [row[0] or "" for row in rows]

    def quarantine(self, run: str, device: str) -> int:
        """What still waits for a device that fails will not be tried in this run; how many cells."""
        with self._changing() as base:
            return base.execute(
                "UPDATE cells SET state='quarantined' WHERE run=? AND device=? AND state='waiting'", (run, device)
            ).rowcount

    def finish(self, run: str, now: float) -> None:
        with self._changing() as base:
            base.execute("UPDATE runs SET ended_at=? WHERE id=?", (now, run))

    def lab(self, run: str) -> Lab:
        return Lab.model_validate_json(self._run_row(run)[4])

    def info(self, run: str) -> RunInfo:
        row = self._run_row(run)
        states = dict(self._rows("SELECT state, count(*) FROM cells WHERE run=? GROUP BY state", run))
        return RunInfo(row[0], row[1], row[2], row[3], states)

    def states(self, run: str, device: str) -> dict[str, int]:
        return dict(
            self._rows("SELECT state, count(*) FROM cells WHERE run=? AND device=? GROUP BY state", run, device)
        )

    def history(self, lab: str | None = None) -> list[RunInfo]:
        """Newest first, whatever the clock said when they began."""
        rows = self._rows("SELECT id FROM runs WHERE ?1 IS NULL OR lab=?1 ORDER BY rowid DESC", lab)
        return [self.info(row[0]) for row in rows]

    def cells(self, run: str) -> Iterator[tuple[Cell, str]]:
        """Every cell with its state, a few at a time."""
        place = -1
        while rows := self._rows(
            "SELECT place, cell, state FROM cells WHERE run=? AND place>? ORDER BY place LIMIT 200", run, place
        ):
            place = rows[-1][0]
            for _, cell, state in rows:
                yield Cell.model_validate_json(cell), state

    def result(self, run: str, cell: str) -> Measurement | None:
        rows = self._rows("SELECT measurement FROM results WHERE run=? AND cell=?", run, cell)
        return Measurement.model_validate_json(rows[0][0]) if rows else None

    def plan(self, artifact_sha256: str) -> Plan | None:
        """The plan by which an artifact was made, wherever the artifact is by now; None where it is not known."""
        rows = self._rows("SELECT plan FROM plans WHERE artifact_sha256=?", artifact_sha256)
        try:
            return Plan.model_validate_json(rows[0][0]) if rows else None
        except ValidationError:
            return None  # of an edgekit with other plans

    def attempts(self, run: str) -> list[Attempt]:
        """Every try, those at one cell in their order."""
        rows = self._rows(
            "SELECT cell, number, begun_at, ended_at, outcome, why FROM attempts WHERE run=? ORDER BY cell, number",
            run,
        )
        return [Attempt(*row) for row in rows]

    def trouble(self, run: str, most: int) -> list[tuple[str, Attempt]]:
        """The attempts that gave no result, each with its device."""
        rows = self._rows(
            "SELECT cells.device, tried.cell, number, begun_at, ended_at, outcome, why FROM attempts AS tried "
            "JOIN cells ON cells.run=tried.run AND cells.id=tried.cell "
            "WHERE tried.run=? AND outcome IS NOT 'measured' ORDER BY place, number LIMIT ?",
            run,
            most,
        )
        return [(row[0], Attempt(*row[1:])) for row in rows]

    def set_baseline(self, lab: str, run: str) -> None:
        self.info(run)
        with self._changing() as base:
            base.execute("INSERT OR REPLACE INTO baselines VALUES (?, ?)", (lab, run))

    def baseline(self, lab: str) -> str | None:
        rows = self._rows("SELECT run FROM baselines WHERE lab=?", lab)
        return str(rows[0][0]) if rows else None

    def close(self) -> None:
        self._base.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_row(self, run: str) -> tuple[Any, ...]:
        rows = self._rows("SELECT id, lab, begun_at, ended_at, spec FROM runs WHERE id=?", run)
        if not rows:
            known = [row[0] for row in self._rows("SELECT id FROM runs ORDER BY rowid DESC LIMIT 20")]
            raise UnknownName("run", run, known) if known else InvalidInput(f"no run {clip(run)}; the store is empty")
        return rows[0]


def json_of(info: RunInfo) -> str:
    """One line for a script."""
    return json.dumps(info._asdict())
