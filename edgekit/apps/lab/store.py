"""The store of a lab's runs: one SQLite file that survives a power cut, with one commit per result.

It holds the entries of the matrix, which the tables call cells, and the outcome of each attempt.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from edgekit import Plan, open_artifact
from edgekit.apps.bench import Measurement
from edgekit.apps.lab.matrix import Lab, MatrixEntry
from edgekit.common.bounds import Count, Moment, Text
from edgekit.common.files import free_bytes
from edgekit.common.parsing import sentence_of, validate
from edgekit.errors import DamagedArtifact, InvalidInput, OutOfSpace, UnknownName, quote_short

EntryOutcome = Literal["measured", "failed", "infra_lost", "disturbed", "stopped"]
EntryState = Literal["waiting", "running", "done", "failed", "lost", "quarantined"]
Stored = TypeVar("Stored", bound=BaseModel)
Row = TypeVar("Row")
_VERSION, _PAGE_BYTES = 1, 1 << 20
_NOT_DAMAGED = {
    sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED,
}  # fmt: skip
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
"""


class RunInfo(NamedTuple):
    """One run of a lab's history."""

    id: Text
    lab: Text
    begun_at: Moment
    ended_at: Moment | None
    states: dict[EntryState, Count]


class Attempt(NamedTuple):
    """One attempt at an entry."""

    entry: Text
    number: Count
    begun_at: Moment
    ended_at: Moment | None
    outcome: EntryOutcome | None
    why: Text


_RUN_INFO, _ATTEMPT = TypeAdapter(RunInfo), TypeAdapter(Attempt)


class AttemptEnd(NamedTuple):
    """How an attempt at an entry ended, and in which state the entry is then."""

    outcome: EntryOutcome
    state: EntryState
    why: str = ""
    result: Measurement | None = None


class LabStore:
    """A lab's store. Safe to use from several threads: one connection, one transaction at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._lock = path, Lock()
        with self._undamaged():
            self._base = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        try:
            with self._undamaged():
                self._base.execute("PRAGMA journal_mode=WAL")
                version = self._base.execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:
                raise InvalidInput(f"{path}: was written by a newer edgekit (version {version}); upgrade edgekit")
            with self._changing() as base:
                for statement in _SCHEMA.split(";\n"):
                    base.execute(statement)
                base.execute(f"PRAGMA user_version={_VERSION}")
        except BaseException:
            self._base.close()
            raise

    @contextmanager
    def _undamaged(self) -> Iterator[None]:
        """Convert errors of SQLite to `DamagedArtifact`, and a full disk to `OutOfSpace`."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # a message of SQLite may quote damaged text
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # without its details
            # Without room for the index of its log, SQLite says that it cannot read.
            if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and free_bytes(self.path) < _PAGE_BYTES):
                raise OutOfSpace(str(self.path), _PAGE_BYTES, free_bytes(self.path)) from error
            reason = quote_short(str(error), 200).strip("'\"")
            if code in _NOT_DAMAGED:
                raise InvalidInput(f"{self.path}: cannot be used: {reason}; look at the disk and its limits") from error
            raise DamagedArtifact(f"{self.path}: is not a store of lab runs: {reason}; move it away") from error

    @contextmanager
    def _changing(self, *, at_once: bool = True) -> Iterator[sqlite3.Connection]:
        """Run a transaction. `at_once`: it is durable on return; otherwise with the next durable one."""
        with self._lock, self._undamaged():
            self._base.execute(f"PRAGMA synchronous={'FULL' if at_once else 'NORMAL'}")
            try:
                self._base.execute("BEGIN IMMEDIATE")
                yield self._base
                self._base.execute("COMMIT")
            except BaseException:
                if self._base.in_transaction:  # SQLite ends the transaction itself when the disk is full
                    self._base.execute("ROLLBACK")
                raise

    def _rows(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, self._undamaged():
            return self._base.execute(question, values).fetchall()

    def _object(self, text: Any, model: type[Stored]) -> Stored:
        """Parse a stored object."""
        if not isinstance(text, str):
            raise DamagedArtifact(f"{self.path}: holds {quote_short(text)} for an object; move it away")
        return validate(text, model, str(self.path))

    def _row(self, values: Sequence[Any], row: TypeAdapter[Row]) -> Row:
        """Check the types and bounds of a row."""
        try:
            return row.validate_python(tuple(values), strict=False)
        except ValidationError as error:
            raise DamagedArtifact(f"{self.path}: {sentence_of(error)}; move it away") from error

    def begin(self, run: str, lab: Lab, entries: Iterable[MatrixEntry], now: float) -> None:
        """Store a new run with all its entries and the plans of their artifacts."""
        folders: set[str] = set()

        def rows() -> Iterator[tuple[str, str, int, str, str]]:
            for index, entry in enumerate(entries):
                folders.add(entry.artifact)
                yield run, entry.id, index, entry.device, entry.model_dump_json()

        with self._changing() as base:
            base.execute("INSERT INTO runs VALUES (?, ?, ?, NULL, ?)", (run, lab.name, now, lab.model_dump_json()))
            base.executemany("INSERT INTO cells VALUES (?, ?, ?, ?, 'waiting', ?)", rows())
            for folder in sorted(folders):
                opened = open_artifact(Path(folder))
                base.execute("INSERT OR IGNORE INTO plans VALUES (?, ?)", (opened.sha256, opened.plan.to_json()))

    def reopen(self, run: str, now: float) -> int:
        """After a crash, mark open attempts as stopped and requeue their entries; return their number."""
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

    def take(self, run: str, device: str, now: float) -> tuple[MatrixEntry, int] | None:
        """Start the device's next entry; return it with the attempt's number, or None if none is waiting."""
        with self._changing(at_once=False) as base:  # after a power cut the entry waits again, as it should
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
            taken = self._object(row[1], MatrixEntry)
        return taken, before + 1

    def end(self, run: str, entry: str, number: int, ended: AttemptEnd, now: float) -> bool:
        """End an attempt and store its result, if any. Return False if the entry has a result already, which stays."""
        with self._changing() as base:
            base.execute(
                "UPDATE attempts SET ended_at=?, outcome=?, why=? "
                "WHERE run=? AND cell=? AND number=? AND ended_at IS NULL",
                (now, ended.outcome, ended.why[:2000], run, entry, number),
            )
            is_new = True
            if (result := ended.result) is not None:
                is_new = (
                    base.execute(
                        "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", (run, entry, result.model_dump_json(), now)
                    ).rowcount
                    == 1
                )
            base.execute("UPDATE cells SET state=? WHERE run=? AND id=? AND state != 'done'", (ended.state, run, entry))
        return is_new

    def outcomes(self, run: str, entry: str) -> list[str]:
        """Return the outcomes of the attempts at an entry, in order."""
        rows = self._rows("SELECT outcome FROM attempts WHERE run=? AND cell=? ORDER BY number", run, entry)
        return [row[0] or "" for row in rows]

    def quarantine(self, run: str, device: str) -> int:
        """Give up the waiting entries of a failing device for this run; return their number."""
        with self._changing() as base:
            return base.execute(
                "UPDATE cells SET state='quarantined' WHERE run=? AND device=? AND state='waiting'", (run, device)
            ).rowcount

    def finish(self, run: str, now: float) -> None:
        with self._changing() as base:
            base.execute("UPDATE runs SET ended_at=? WHERE id=?", (now, run))

    def lab(self, run: str) -> Lab:
        return self._object(self._run_row(run)[4], Lab)

    def info(self, run: str) -> RunInfo:
        row = self._run_row(run)
        states = dict(self._rows("SELECT state, count(*) FROM cells WHERE run=? GROUP BY state", run))
        return self._row((*row[:4], states), _RUN_INFO)

    def states(self, run: str, device: str) -> dict[str, int]:
        return dict(
            self._rows("SELECT state, count(*) FROM cells WHERE run=? AND device=? GROUP BY state", run, device)
        )

    def history(self, lab: str | None = None) -> list[RunInfo]:
        """Return the runs, newest first by their order in the store."""
        rows = self._rows("SELECT id FROM runs WHERE ?1 IS NULL OR lab=?1 ORDER BY rowid DESC", lab)
        return [self.info(str(row[0])) for row in rows]

    def entries(self, run: str) -> Iterator[tuple[MatrixEntry, str]]:
        """Yield every entry with its state, reading a few at a time."""
        place = -1
        while rows := self._rows(
            "SELECT place, cell, state FROM cells WHERE run=? AND place>? ORDER BY place LIMIT 200", run, place
        ):
            place = rows[-1][0]
            for _, entry, state in rows:
                yield self._object(entry, MatrixEntry), state

    def result(self, run: str, entry: str) -> Measurement | None:
        rows = self._rows("SELECT measurement FROM results WHERE run=? AND cell=?", run, entry)
        return self._object(rows[0][0], Measurement) if rows else None

    def plan(self, artifact_sha256: str) -> Plan | None:
        """Return the plan of an artifact, even if its files are gone; None if unknown."""
        rows = self._rows("SELECT plan FROM plans WHERE artifact_sha256=?", artifact_sha256)
        try:
            return Plan.model_validate_json(rows[0][0]) if rows else None
        except ValidationError:
            return None  # by an edgekit with another format of plans

    def attempts(self, run: str) -> list[Attempt]:
        """Return every attempt; attempts at the same entry are in order."""
        rows = self._rows(
            "SELECT cell, number, begun_at, ended_at, outcome, why FROM attempts WHERE run=? ORDER BY cell, number",
            run,
        )
        return [self._row(row, _ATTEMPT) for row in rows]

    def trouble(self, run: str, most: int) -> list[tuple[str, Attempt]]:
        """Return the attempts without a result, each with its device."""
        rows = self._rows(
            "SELECT cells.device, tried.cell, number, begun_at, ended_at, outcome, why FROM attempts AS tried "
            "JOIN cells ON cells.run=tried.run AND cells.id=tried.cell "
            "WHERE tried.run=? AND outcome IS NOT 'measured' ORDER BY place, number LIMIT ?",
            run,
            most,
        )
        return [(str(row[0]), self._row(row[1:], _ATTEMPT)) for row in rows]

    def close(self) -> None:
        self._base.close()

    def __enter__(self) -> LabStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_row(self, run: str) -> tuple[Any, ...]:
        rows = self._rows("SELECT id, lab, begun_at, ended_at, spec FROM runs WHERE id=?", run)
        if not rows:
            known = [str(row[0]) for row in self._rows("SELECT id FROM runs ORDER BY rowid DESC LIMIT 20")]
            raise (
                UnknownName("run", run, known)
                if known
                else InvalidInput(f"no run {quote_short(run)}; the store is empty")
            )
        return rows[0]
