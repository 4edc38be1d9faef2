"""Child processes, each killed with everything that it started: JSON over pipes, a warm sandbox, bounded programs.

A message over a pipe is a JSON object after its length in four bytes. Nothing else of edgekit starts processes that
outlive a call.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Lock, Timer
from typing import Any, NamedTuple

from edgekit.common.log import log
from edgekit.errors import LimitExceeded, RuntimeClosed, Unsupported

START_LIMIT_S = 30.0  # for Python and its imports; the work's own limit comes after
_KEPT_ENVIRONMENT = ("TZ", "SYSTEMROOT")


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that `start_new_session` started, with its descendants, and wait for it."""
    _signal_group(process)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


class PipedProcess:
    """A running process that answers JSON requests over its pipes, one at a time; not thread-safe.

    Args:
        command: the program and its arguments.
        env: its whole environment; None inherits ours.
        cwd: its working directory; None inherits ours.
        keep_errors: keep what it writes to stderr, for `last_error_line`; otherwise stderr is dropped.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        keep_errors: bool = False,
    ) -> None:
        self._owner = os.getpid()
        self._errors = TemporaryFile() if keep_errors else None  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors or subprocess.DEVNULL,
            env=env,
            cwd=cwd,
            start_new_session=True,  # ctrl-C at the terminal reaches edgekit alone, which then ends the process
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def request(self, message: Mapping[str, Any], *, limit_s: float, limit_bytes: int) -> dict[str, Any]:
        """Send a message and return the answer.

        Raises EOFError if none came within `limit_s` seconds and `limit_bytes`; the process is then of no use: kill it.
        """
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None and sink is not None
        data = json.dumps(message).encode()
        timer = Timer(limit_s, _signal_group, [self._process])  # a killed process closes its pipe, which ends the read
        timer.daemon = True
        timer.start()
        try:
            sink.write(len(data).to_bytes(4, "big") + data)
            sink.flush()
            size = int.from_bytes(_read_exactly(source, 4), "big")
            if size > limit_bytes:
                raise EOFError(f"an answer of {size} bytes; at most {limit_bytes} are read")
            answer = json.loads(_read_exactly(source, size))
        except (OSError, ValueError) as error:
            raise EOFError(f"no answer: {error}") from error
        finally:
            timer.cancel()
        if not isinstance(answer, dict):
            raise EOFError(f"an answer of type {type(answer).__name__}; expected an object")
        return answer

    def interrupt(self) -> None:
        """Kill the process from any thread; a request that waits for its answer ends."""
        if os.getpid() == self._owner:
            _signal_group(self._process)

    def kill(self) -> int:
        """Kill the process and its descendants; return its exit code."""
        if os.getpid() == self._owner:  # a forked process has the pipes too, and the process is not its own
            kill_group(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # nobody reads what was still buffered
                pipe.close()
        return self._process.returncode or 0

    def last_error_line(self) -> str:
        """The last line that it wrote to stderr; empty if there is none or stderr was not kept."""
        if self._errors is None or self._errors.closed:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """Kill the process and drop its stderr."""
        self.kill()
        if self._errors is not None:
            self._errors.close()


def _read_exactly(source: Any, count: int) -> bytes:
    data: bytes = source.read(count)
    if len(data) < count:
        raise EOFError("the process ended")
    return data


class ChildProcess:
    """A warm process for untrusted work, isolated from our environment and packages; safe to use from several threads.

    It starts when first needed, is killed when an answer is late, and is replaced at the next request.

    Args:
        program: a Python file without imports of edgekit, which answers the messages of `PipedProcess`.
        what: the work in words, for error messages.
        limit_s: seconds for one answer.
    """

    def __init__(self, program: Path, what: str, limit_s: float) -> None:
        self._program, self._what, self._limit_s = program, what, limit_s
        self._process: PipedProcess | None = None
        self._end_with_us: weakref.finalize[..., ChildProcess] | None = None
        self._greeted = self._is_closed = False
        self._lock = Lock()

    def start(self) -> None:
        """Start the process now, without waiting for it."""
        with self._lock:
            self._running()

    def ask(self, request: Mapping[str, Any], limit_bytes: int) -> dict[str, Any]:
        """Return its answer.

        Raises LimitExceeded if it took too long, wrote too much or died, and RuntimeClosed once `close` was called.
        """
        with self._lock:
            try:
                process = self._running()
                if not self._greeted:
                    process.request({}, limit_s=START_LIMIT_S, limit_bytes=64)
                    self._greeted = True
                return process.request(request, limit_s=self._limit_s, limit_bytes=limit_bytes)
            except (OSError, EOFError) as error:
                self._end()
                self._check_open()
                log.warning("killed the process of %s, which has a limit of %g s", self._what, self._limit_s)
                raise LimitExceeded(
                    f"{self._what} was stopped: it ran longer than {self._limit_s:g} s or broke its process"
                ) from error
            except BaseException:
                self._end()  # after an interrupt, the next answer on the pipe would belong to this request
                raise

    def close(self) -> None:
        """End the process, also while it works: a thread that waits for its answer holds the lock."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.interrupt()
        with self._lock:
            self._end()

    @property
    def process_id(self) -> int | None:
        """The operating system's id; None while no process runs."""
        return self._process.pid if self._process else None

    def _running(self) -> PipedProcess:
        if self._process is None or not self._process.is_running:
            self._end()
            if getattr(sys, "frozen", False) or not sys.executable:
                # The executable of a bundled program is the program itself, which would start itself again.
                raise Unsupported(
                    f"{self._what} needs a Python interpreter beside this bundled program; use plain prompts"
                )
            self._greeted = False
            self._process = PipedProcess(
                [sys.executable, "-I", "-S", str(self._program), json.dumps([path for path in sys.path if path])],
                env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
                cwd=os.sep,
            )
            # A runtime that is dropped without `close` leaves no process behind.
            self._end_with_us = weakref.finalize(self, self._process.close)
        self._check_open()  # last: `close` either sees the process or is seen here
        return self._process

    def _check_open(self) -> None:
        if self._is_closed:
            self._end()
            raise RuntimeClosed("this runtime is closed; open the artifact again")

    def _end(self) -> None:
        process, self._process = self._process, None
        if self._end_with_us is not None:
            self._end_with_us.detach()
        if process is not None:
            process.close()


class Completed(NamedTuple):
    """A program that ended: its exit code (negative: the signal), stdout, and the end of stderr."""

    code: int
    output: bytes
    errors: bytes


class ProgramRunner:
    """Runs programs to their end, and ends all of them on `stop`, which any thread may call."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = Event()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        *,
        limit_bytes: int,
        errors_bytes: int,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        on_start: Callable[[int], None] | None = None,
        inherited_fd: int | None = None,
    ) -> Completed:
        """Run a command; no process of its group is left afterwards.

        Args:
            timeout_s: seconds before it is killed, which raises `subprocess.TimeoutExpired`.
            limit_bytes: the most of stdout that is read; `output` then has one byte more, so that callers can tell.
            errors_bytes: bytes of the end of stderr that are kept.
            stdin: its whole input.
            env: its whole environment; None inherits ours.
            on_start: called with the process id right after the start.
            inherited_fd: a file descriptor that the program keeps open, such as that of a lock.

        Raises OSError if the program cannot be started.
        """
        with TemporaryFile() as out, TemporaryFile() as err, TemporaryFile() as source:
            source.write(stdin)
            source.seek(0)
            process = subprocess.Popen(
                command, stdin=source, stdout=out, stderr=err, env=env, start_new_session=True,
                pass_fds=() if inherited_fd is None else (inherited_fd,),
            )  # fmt: skip
            with self._tracked(process):
                if on_start is not None:
                    on_start(process.pid)
                code = process.wait(timeout_s)
            out.seek(0)
            err.seek(max(0, err.seek(0, os.SEEK_END) - errors_bytes))
            return Completed(code, out.read(limit_bytes + 1), err.read())

    def stop(self) -> None:
        """Kill every running program; later ones are killed as soon as they start."""
        self._stopped.set()
        for process in list(self._running):
            _signal_group(process)

    @contextmanager
    def _tracked(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        self._running.add(process)
        try:
            if self._stopped.is_set():
                _signal_group(process)
            yield
        finally:
            self._running.discard(process)
            kill_group(process)
