"""Operations whose n-th call of the system fails, for each n until they end well.

    python tests/helpers/fault_points.py --operation export --call rename

`faults.c` is preloaded and lets one call fail: open, write, fsync, rename, mmap, fork, the start of a thread, or an
allocation of 16 KiB and more. Each case runs in a separate process. Afterwards whatever can be opened must be whole,
the same operation again must end in the bytes of an unbroken run with no other file, and no process is left.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
CALLS = ("open", "write", "fsync", "rename", "mmap", "fork", "thread", "allocation")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans become children of this process, which then sees them
_LONGEST_S, _SHORTEST_S = 300.0, 15.0
_MAY_HANG = ("mmap", "allocation")  # without memory, CPython may lose a thread that is just starting and wait for it


class Operation(NamedTuple):
    """`prepare` fills a folder with what exists before; `run` is the work; `check` opens what there is afterwards."""

    prepare: Callable[[Path], object]
    run: Callable[[Path], object]
    check: Callable[[Path], None]


class Found(NamedTuple):
    """The ending of one case: `done`, the class of an error, or `signal N`; and the calls until then."""

    ending: str
    calls: int


def library(folder: Path) -> Path:
    """Build the preloaded library."""
    place = folder / "faults.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(place), str(HERE / "faults.c"), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return place


def bytes_in(folder: Path) -> dict[str, str]:
    """The hash of every file, by name; a lab's store holds times, and is checked otherwise."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(_comparable(path)).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith("lab.sqlite") and "facts" not in path.parts
    }


def _comparable(path: Path) -> bytes:
    """The bytes of a file; of an artifact's manifest its files, since its plan holds memory that was measured."""
    data = path.read_bytes()
    # An index counts how often it was written.
    part = {"manifest.json": "files", "index.json": "channels"}.get(path.name)
    return json.dumps(json.loads(data)[part]).encode() if part else data


def in_child(operation: Operation, folder: Path, call: str | None, number: int, limit_s: float = _LONGEST_S) -> Found:
    """Run the operation in a forked process in which call `number` of that kind fails."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setsid()
        _work(operation, folder, call, number, writing)
    os.close(writing)
    end, status = time.monotonic() + limit_s, 0
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > end:
            assert call in _MAY_HANG, f"{call} {number}: it hangs"
            os.killpg(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.005)
    with os.fdopen(reading, "rb") as pipe:
        ending, _, calls = pipe.read().decode().partition("\n")
    _no_process_is_left(f"{call} {number}")
    if os.WIFSIGNALED(status):
        # Libraries of vendors end the process where they get no memory; nothing else may.
        assert call in _MAY_HANG, f"{call} {number}: ended by signal {os.WTERMSIG(status)}"
        return Found(f"signal {os.WTERMSIG(status)}", 0)
    assert ending, f"{call} {number}: it says nothing"
    return Found(ending, int(calls or 0))


def _work(operation: Operation, folder: Path, call: str | None, number: int, writing: int) -> None:
    """The child: its ending and the number of calls go into the pipe."""
    faults = ctypes.CDLL(None)
    try:
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        subprocess._USE_VFORK = subprocess._USE_POSIX_SPAWN = False  # type: ignore[attr-defined] # forks are counted
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        if call is not None:
            faults.arm_fault(CALLS.index(call) + 1, ctypes.c_long(number))
        try:
            operation.run(folder)
            ending = "done"
        except BaseException as error:
            faults.disarm_faults()
            ending = _named(error)
        faults.disarm_faults()
        os.write(writing, f"{ending}\n{faults.count_of_calls()}".encode())
    finally:
        os._exit(0)


def _named(error: BaseException) -> str:
    """The class of an error; anything but an error of ours, of the system or of memory is a bug."""
    from edgekit.cli import NO_THREAD
    from edgekit.errors import EdgekitError

    is_right = isinstance(error, EdgekitError | OSError | MemoryError) or str(error) == NO_THREAD
    if isinstance(error, EdgekitError) and "\n" in str(error):
        is_right = False
    fault = "" if is_right else " BUG: " + " ".join(str(error).split())[:300]
    return type(error).__name__ + fault


def _no_process_is_left(what: str) -> None:
    end = time.monotonic() + 5
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                assert time.monotonic() < end, f"{what}: a process is left"
                time.sleep(0.05)
        except ChildProcessError:
            return


def cases(operation: Operation, call: str, place: Path, most: int | None = None) -> Iterator[tuple[int, Found]]:
    """Let each call of that kind fail in turn, or `most` of them evenly; check what is left, and repeat the work."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)

    def fresh() -> Path:
        shutil.rmtree(place, ignore_errors=True)
        (place / "tmp").mkdir(parents=True)
        operation.prepare(place)
        return place

    began = time.monotonic()
    whole = in_child(operation, fresh(), call, 0)
    shortest_s = 3.0 if call in _MAY_HANG else _SHORTEST_S
    limit_s = max(shortest_s, 10 * (time.monotonic() - began))
    assert whole.ending == "done", whole
    operation.check(place)
    expected = bytes_in(place)
    numbers = range(1, whole.calls + 1)
    if most is not None and whole.calls > most:
        numbers = range(1, whole.calls + 1, -(-whole.calls // most))
    for number in numbers:
        found = in_child(operation, fresh(), call, number, limit_s)
        assert "BUG" not in found.ending, f"{call} {number}: {found.ending}"
        operation.check(place)
        again = in_child(operation, place, None, 0)
        assert again.ending == "done", f"{call} {number}: {found.ending}, then {again.ending}"
        operation.check(place)
        left = bytes_in(place)
        assert left == expected, f"{call} {number}: {sorted(left.items() ^ expected.items())[:6]}"
        yield number, found
    shutil.rmtree(place)


def main() -> int:
    from faulty_operations import operations

    parser = argparse.ArgumentParser(description="Let every call of the system fail in turn.")
    parser.add_argument("--operation", action="append")
    parser.add_argument("--call", choices=CALLS, action="append")
    parser.add_argument("--most", type=int, help="at most this many calls of each kind, evenly spread")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        if "faults.so" not in os.environ.get("LD_PRELOAD", ""):
            # One thread: a library's pool does not exist in the forked processes, which would wait for it.
            own = {"LD_PRELOAD": str(library(folder)), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
            environment = os.environ | own
            return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
        made = operations(folder / "shared")
        for title in options.operation or made:
            for call in options.call or CALLS:
                began, seen = time.monotonic(), Counter[str]()
                for _, found in cases(made[title], call, folder / "case", options.most):
                    seen[found.ending] += 1
                took = time.monotonic() - began
                sys.stdout.write(f"{title}, {call}: {sum(seen.values())} cases in {took:.0f} s: {dict(seen)}\n")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
