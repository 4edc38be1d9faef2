"""A program that does untrusted work in a process of its own: it stays warm and is killed past its time.

Requests and answers are JSON objects, each after its length in four bytes. It knows nothing of what the work is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from edgekit.errors import LimitExceeded, Unsupported

START_LIMIT_S = 30.0  # for Python and its imports; the work's own limit comes after
_KEPT_ENVIRONMENT = ("TZ", "SYSTEMROOT")
_HELLO = b"{}"


class Worker:
    """One killable process, started when first needed. Safe to use from several threads; one asks at a time."""

    def __init__(self, program: Path, what: str, limit_s: float) -> None:
        self._program, self._what, self._limit_s = program, what, limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._greeted = False
        self._lock = Lock()

    def start(self) -> None:
        """Start it now, without waiting for it."""
        with self._lock:
            self._running()

    def ask(self, request: Mapping[str, Any], limit_bytes: int) -> dict[str, Any]:
        """Its answer; LimitExceeded where it took too long, said too much or died (the next finds a fresh one)."""
        data = json.dumps(request).encode()
        with self._lock:
            try:
                process = self._running()
                if not self._greeted:
                    with _killing(process, START_LIMIT_S):
                        _exchange(process, _HELLO, 64)
                    self._greeted = True
                with _killing(process, self._limit_s):
                    return _exchange(process, data, limit_bytes)
            except (OSError, EOFError, ValueError) as error:
                self._end()
                raise LimitExceeded(
                    f"{self._what} was stopped: it ran longer than {self._limit_s:g} s or broke its process"
                ) from error
            except BaseException:
                self._end()  # interrupted: the next answer on the pipe would be this one's
                raise

    def close(self) -> None:
        with self._lock:
            self._end()

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process else None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            if getattr(sys, "frozen", False) or not sys.executable:
                # A bundled program's executable is the program itself, which would start itself again.
                raise Unsupported(
                    f"{self._what} needs a Python interpreter beside this bundled program; use plain prompts"
                )
            self._greeted = False
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(self._program), json.dumps([path for path in sys.path if path])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
                cwd=os.sep,
                start_new_session=True,  # ctrl-C at the terminal is for us, not for it
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was still buffered has nobody to read it
                    pipe.close()


@contextmanager
def _killing(process: subprocess.Popen[bytes], limit_s: float) -> Iterator[None]:
    """Kill the process after `limit_s`, which ends whatever waits for its answer."""
    timer = Timer(limit_s, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _exchange(process: subprocess.Popen[bytes], data: bytes, limit_bytes: int) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(len(data).to_bytes(4, "big") + data)
    process.stdin.flush()
    size = int.from_bytes(_exactly(process, 4), "big")
    if size > limit_bytes:
        raise EOFError(f"an answer of {size} bytes")
    answer: dict[str, Any] = json.loads(_exactly(process, size))
    return answer


def _exactly(process: subprocess.Popen[bytes], count: int) -> bytes:
    assert process.stdout is not None
    data = process.stdout.read(count)
    if len(data) < count:
        raise EOFError("the worker ended")
    return data
