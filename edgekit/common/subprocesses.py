"""Child processes, each killed with all its descendants: JSON over pipes, a warm sandbox, programs with limits.

A message over a pipe is a JSON object after its length in four bytes, big-endian. No other module starts processes
that outlive a call.
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
from threading import Event, Timer
from typing import Any, NamedTuple

from edgekit.common.locks import ThreadLock
from edgekit.common.log import log
from edgekit.common.units import MIB
from edgekit.errors import LimitExceeded, RuntimeClosed, Unsupported

WORKER_BYTES = 11 * MIB  # private, of the worker of chats or of formats: 10.6 and 10.9 MiB were measured
START_LIMIT_S = 30.0  # for Python and its imports; the work's own limit comes after
_KEPT_ENVIRONMENT = ("TZ", "SYSTEMROOT")


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that `start_new_session` started, with its descendants, and wait for it."""
    _signal_group(process)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes]) -> None:
    if sys.platform == "win32":
        process.kill()
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class PipedProcess:
    """A process that answers JSON requests over its pipes, one at a time; not thread-safe.

    Args:
        command: the program and its arguments.
        env: its complete environment; None inherits ours.
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
            start_new_session=True,  # ctrl-C at the terminal then reaches edgekit only, which ends the process
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def request(self, message: Mapping[str, Any], *, limit_s: float, limit_bytes: int) -> dict[str, Any]:
        """Send a message and return the answer.

        Raises EOFError if there is none within `limit_s` seconds and `limit_bytes`. Kill the process after that.
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
        """Kill the process, from any thread; a waiting request raises EOFError."""
        if os.getpid() == self._owner:
            _signal_group(self._process)

    def kill(self) -> int:
        """Kill the process and its descendants; return its exit code."""
        if os.getpid() == self._owner:  # a fork of ours shares the pipes but must not kill the process
            kill_group(self._process)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # closing flushes the buffer into a broken pipe
                pipe.close()
        return self._process.returncode or 0

    def last_error_line(self) -> str:
        """Return the process's last line on stderr; empty if there is none or stderr was not kept."""
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
        self._lock = ThreadLock()

    def start(self) -> None:
        """Start the process now, without waiting for it."""
        with self._lock:
            self._running()

    def ask(self, request: Mapping[str, Any], limit_bytes: int) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises LimitExceeded if it takes too long, answers too much or dies, and RuntimeClosed after `close`.
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
                    f"{self._what} was stopped: it ran longer than {self._limit_s:g} s, took too much memory "
                    "or broke its process"
                ) from error
            except BaseException:
                self._end()  # otherwise the next request would read the answer to this one
                raise

    def restart(self) -> None:
        """End the process, which may have kept memory; the next request starts another."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """End the process, even during a request, whose thread holds the lock."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.interrupt()
        if not self._lock.is_mine:  # as in a signal handler: the interrupted request then ends the process
            with self._lock:
                self._end()

    @property
    def process_id(self) -> int | None:
        """The process id; None while no process runs."""
        return self._process.pid if self._process else None

    def _running(self) -> PipedProcess:
        if self._process is None or not self._process.is_running:
            self._end()
            if getattr(sys, "frozen", False) or not sys.executable:
                # In a bundled program, `sys.executable` is that program itself, not Python.
                raise Unsupported(
                    f"{self._what} needs a Python interpreter next to this bundled program; use plain prompts"
                )
            self._greeted = False
            self._process = PipedProcess(
                [sys.executable, "-I", "-S", str(self._program), json.dumps([path for path in sys.path if path])],
                env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ},
                cwd=os.sep,
            )
            # Ends the process if the runtime is garbage-collected without `close`.
            self._end_with_us = weakref.finalize(self, self._process.close)
        self._check_open()  # last: either `close` sees the process, or this check sees `close`
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


class CommandResult(NamedTuple):
    """The result of a program: its exit code (negative: the signal), stdout, and the end of stderr."""

    code: int
    output: bytes
    errors: bytes


class ProgramRunner:
    """Runs programs to completion; `stop`, from any thread, kills all of them."""

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
    ) -> CommandResult:
        """Run a command; all processes of its group are gone afterwards.

        Args:
            timeout_s: seconds until it is killed, which raises `subprocess.TimeoutExpired`.
            limit_bytes: limit on stdout; a longer output is cut to one byte more, so that callers can tell.
            errors_bytes: length of the kept end of stderr.
            stdin: its complete input.
            env: its complete environment; None inherits ours.
            on_start: called with the process id right after the start.
            inherited_fd: a file descriptor that the program inherits, such as a lock's.

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
            return CommandResult(code, out.read(limit_bytes + 1), err.read())

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
