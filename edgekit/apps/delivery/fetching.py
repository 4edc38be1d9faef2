"""Fetches the missing chunks of an artifact into its staging folder.

A fetch keeps no journal: after an interruption it hashes the bytes on the disk, and chunks with the right hash are not
fetched again.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from edgekit.apps.delivery.site_index import file_name
from edgekit.apps.delivery.transport import SLOWEST_BYTES_PER_S, Connection, RangesMissing, Site
from edgekit.common.files import disk_full, free_bytes
from edgekit.common.progress import Progress
from edgekit.common.system import read_at, write_at
from edgekit.contracts.manifest import Manifest
from edgekit.errors import DamagedArtifact, NetworkMetered, OutOfSpace, TransferFailed

MOST_CONNECTIONS = 16
_MOST_RANGE_BYTES = 8 << 20  # per request; longer ranges would leave other connections idle at the end
_MOST_ATTEMPTS = 6  # without a new chunk between them
_WRONG_BYTES_ATTEMPTS = 2
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_BLOCK = 1 << 20
_GRACE_S = 300.0  # time before the speed counts


class PlacedChunk(NamedTuple):
    """One chunk and its offset in a file."""

    path: Path
    file_sha256: str
    offset: int
    bytes: int
    sha256: str


class FetchLimits(NamedTuple):
    """The limits of a fetch."""

    connections: int = 4
    is_metered: Callable[[], bool] = lambda: False
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


def pieces_of(folder: Path, manifest: Manifest) -> Iterator[PlacedChunk]:
    """Yield the chunks of every file of an artifact in `folder`."""
    for name, fact in manifest.files.items():
        offset = 0
        for chunk in fact.parts:
            yield PlacedChunk(folder / name, fact.sha256, offset, chunk.bytes, chunk.sha256)
            offset += chunk.bytes


def prepare(folder: Path, manifest: Manifest) -> None:
    """Create the files of an artifact with their final sizes; bytes of an interrupted fetch stay."""
    needed = sum(fact.bytes for fact in manifest.files.values())
    with disk_full(folder, needed):
        for name, fact in manifest.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink():
                path.unlink()
            with path.open("ab") as file:
                file.truncate(fact.bytes)


def is_whole(piece: PlacedChunk) -> bool:
    """Return True if the bytes on the disk have the chunk's hash."""
    digest, offset, end = hashlib.sha256(), piece.offset, piece.offset + piece.bytes
    try:
        with piece.path.open("rb", buffering=0) as file:
            while offset < end:
                block = read_at(file.fileno(), min(_BLOCK, end - offset), offset)
                if not block:
                    return False
                digest.update(block)
                offset += len(block)
    except OSError:
        return False
    return digest.hexdigest() == piece.sha256


def reuse(missing: list[PlacedChunk], known: Iterable[PlacedChunk], progress: Progress) -> list[PlacedChunk]:
    """Copy chunks from other artifacts on the disk; return those that are still missing."""
    sources: dict[str, list[PlacedChunk]] = {}
    for piece in known:
        sources.setdefault(piece.sha256, []).append(piece)
    rest = []
    for count, piece in enumerate(missing):
        # Hashed before it is copied, so that no other bytes are written.
        same = (each for each in sources.get(piece.sha256, ()) if each.bytes == piece.bytes and is_whole(each))
        source = next(same, None)
        if source is None or not _copied(source, piece):
            rest.append(piece)
        progress(count + 1, len(missing), "looking for chunks on the disk")
    return rest


def _copied(source: PlacedChunk, piece: PlacedChunk) -> bool:
    """Copy a chunk; return False if its source cannot be read or does not have the expected hash."""
    digest, done = hashlib.sha256(), 0
    try:
        with source.path.open("rb", buffering=0) as old, piece.path.open("r+b", buffering=0) as new:
            while done < piece.bytes:
                block = read_at(old.fileno(), min(_BLOCK, piece.bytes - done), source.offset + done)
                if not block:
                    return False
                with disk_full(piece.path, piece.bytes):
                    write_at(new.fileno(), memoryview(block), piece.offset + done)
                digest.update(block)
                done += len(block)
    except OSError:
        return False
    return digest.hexdigest() == piece.sha256


def fetch(site: Site, missing: list[PlacedChunk], limits: FetchLimits, progress: Progress) -> int:
    """Fetch chunks over several connections; return the number of bytes received.

    Raises `TransferFailed`, `DamagedArtifact`, `NetworkMetered` or `OutOfSpace`; complete chunks stay.
    """
    needed = sum(piece.bytes for piece in missing)
    if not needed:
        return 0
    if limits.is_metered():
        raise NetworkMetered(needed)
    free = free_bytes(missing[0].path)
    if free < needed:
        raise OutOfSpace(str(missing[0].path.parent), needed, free)
    return _Fetch(site, missing, limits, progress).run()


class _Fetch:
    """One fetch: a queue of runs (adjacent chunks of a file) and its worker threads."""

    def __init__(self, site: Site, missing: list[PlacedChunk], limits: FetchLimits, progress: Progress) -> None:
        self._site, self._limits, self._progress = site, limits, progress
        self._runs = deque(_runs(missing))
        self._total = sum(piece.bytes for piece in missing)
        self._lock = threading.Lock()
        self._done_bytes = self._read_bytes = 0
        self._error: BaseException | None = None

    def run(self) -> int:
        count = max(1, min(self._limits.connections, MOST_CONNECTIONS, len(self._runs)))
        threads = [threading.Thread(target=self._work, name="edgekit-pull", daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            began = self._limits.clock()
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(0.1)
                self._check_speed(self._limits.clock() - began)
                self._progress(self._done_bytes, self._total, "fetching")
        except BaseException as error:
            self._error = error
            raise
        if self._error is not None:
            raise self._error
        self._progress(self._done_bytes, self._total, "fetching")
        return self._read_bytes

    def _check_speed(self, elapsed_s: float) -> None:
        """Raise `TransferFailed` if the fetch is too slow: its time stays in proportion to its size."""
        if elapsed_s > _GRACE_S + min(self._read_bytes, self._total) / SLOWEST_BYTES_PER_S:
            raise TransferFailed(
                f"{self._site.url}: {self._done_bytes:,} of {self._total:,} bytes in {elapsed_s:.0f} s, slower than"
                f" {SLOWEST_BYTES_PER_S:,} bytes/s; pull again to continue, or check the network",
                is_passing=False,
            )

    def _work(self) -> None:
        try:
            with closing(self._site.connect()) as connection:
                while self._error is None and (run := self._next_run()) is not None:
                    self._fetch_run(connection, run)
        except BaseException as error:
            self._error = self._error or error

    def _next_run(self) -> deque[PlacedChunk] | None:
        with self._lock:
            return self._runs.popleft() if self._runs else None

    def _fetch_run(self, connection: Connection, run: deque[PlacedChunk]) -> None:
        """Fetch a run of chunks. After a failure, pause and continue at the first incomplete chunk."""
        failures, wrong = 0, 0
        while run and self._error is None:
            before = len(run)
            if not connection.sends_ranges:
                self._join_runs_of_file(run)
            try:
                self._read_run(connection, run)
            except RangesMissing:
                continue
            except TransferFailed as error:
                failures = 1 if len(run) < before else failures + 1
                if not error.is_passing or failures >= _MOST_ATTEMPTS:
                    raise
                self._pause(error.wait_s or backoff_s(failures))
            except DamagedArtifact:
                wrong = 1 if len(run) < before else wrong + 1
                if wrong >= _WRONG_BYTES_ATTEMPTS:
                    raise
                self._pause(backoff_s(wrong))

    def _join_runs_of_file(self, run: deque[PlacedChunk]) -> None:
        """Add the queued runs of the same file to `run`, because the server sends only whole files."""
        with self._lock:
            own = [each for each in self._runs if each[0].path == run[0].path]
            self._runs = deque(each for each in self._runs if each[0].path != run[0].path)
        joined = sorted({*run, *(piece for each in own for piece in each)}, key=lambda piece: piece.offset)
        run.clear()
        run.extend(joined)

    def _read_run(self, connection: Connection, run: deque[PlacedChunk]) -> None:
        """Read chunks of one file in order; remove each complete chunk from `run`."""
        name, left = file_name(run[0].file_sha256), sum(piece.bytes for piece in run)
        at = run[0].offset if connection.sends_ranges else 0
        digest = hashlib.sha256()
        with run[0].path.open("r+b", buffering=0) as file:
            for block in connection.read(name, at, run[-1].offset + run[-1].bytes):
                self._check_metered(left)
                self._read_bytes += len(block)
                view = memoryview(block)
                while view:
                    piece = run[0]
                    if at < piece.offset:  # bytes that are on the disk already
                        skipped = min(len(view), piece.offset - at)
                        at, view = at + skipped, view[skipped:]
                        continue
                    part = view[: piece.offset + piece.bytes - at]
                    with disk_full(piece.path, self._total - self._done_bytes):
                        write_at(file.fileno(), part, at)
                    digest.update(part)
                    at, view = at + len(part), view[len(part) :]
                    if at == piece.offset + piece.bytes:
                        self._check(piece, digest.hexdigest(), name)
                        run.popleft()
                        left -= piece.bytes
                        digest = hashlib.sha256()

    def _check(self, piece: PlacedChunk, sha256: str, name: str) -> None:
        if sha256 != piece.sha256:
            raise DamagedArtifact(
                f"{self._site.url}{name}: bytes {piece.offset:,} to {piece.offset + piece.bytes:,} are not those that"
                " the manifest lists; the site is damaged, or a proxy changed them"
            )
        self._done_bytes += piece.bytes

    def _check_metered(self, missing_bytes: int) -> None:
        if self._error is not None:
            raise TransferFailed("stopped", is_passing=False)
        if self._limits.is_metered():
            raise NetworkMetered(missing_bytes)

    def _pause(self, seconds: float) -> None:
        """Sleep; stop early if the fetch has failed."""
        while seconds > 0 and self._error is None:
            step = min(seconds, 0.2)
            self._limits.sleep(step)
            seconds -= step


def backoff_s(failures: int) -> float:
    """Return the seconds to wait after `failures` in a row: exponential backoff with jitter."""
    return float(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** (failures - 1)) * random.uniform(0.5, 1.0))


def _runs(missing: list[PlacedChunk]) -> Iterator[deque[PlacedChunk]]:
    """Group adjacent chunks of a file into runs of at most `_MOST_RANGE_BYTES`."""
    run: deque[PlacedChunk] = deque()
    size = 0
    for piece in missing:
        follows = run and run[-1].path == piece.path and run[-1].offset + run[-1].bytes == piece.offset
        if run and (not follows or size + piece.bytes > _MOST_RANGE_BYTES):
            yield run
            run, size = deque(), 0
        run.append(piece)
        size += piece.bytes
    if run:
        yield run
