"""The program that runs generated code and its tests. `code_sandbox` starts it; it uses the standard library only.

It has three processes:

- The first enters new namespaces (mount, process, network, IPC, host name) and waits.
- The tester is the first process of the new process namespace. It builds a root with the standard library, read-only,
  and a small temporary file system, drops every capability and runs the tests.
- The candidate, a child of the tester, runs the generated code under limits of processor time, memory, processes and
  files.

The tester calls the candidate's function through a pipe and reads Python literals back, so that generated code can
neither reach the tests nor forge a verdict. When the tester ends, the kernel kills every process in its namespace.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

assert sys.platform != "win32"
_NOBODY = 65534
_NAMESPACES = 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # mount, process, network, IPC, host name
_USER_NAMESPACE = 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_CAPABILITY_VERSION = 0x20080522
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_MESSAGE_BYTES = 1 << 20
_WORK = "/work"

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The kernel does not permit the isolation."""


class Failed(Exception):
    """The candidate gave no usable answer."""


def main() -> None:
    limits = json.loads(sys.argv[1])
    job_pipe, verdict_pipe = os.dup(0), os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    try:
        enter_namespaces()
    except (OSError, Refused) as error:
        answer(verdict_pipe, {"refused": str(error)})
        return
    tester = os.fork()
    if tester == 0:
        run_tester(limits, job_pipe, verdict_pipe)
    os.close(verdict_pipe)
    os.close(job_pipe)
    os.waitpid(tester, 0)


def enter_namespaces() -> None:
    """Enter new namespaces; an ordinary user also needs a user namespace, in which mounting is allowed."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        call("new namespaces", _libc.unshare, _NAMESPACES)
        return
    call("user namespaces", _libc.unshare, _NAMESPACES | _USER_NAMESPACE)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path(f"/proc/self/{name}").write_text(text)


def run_tester(limits: dict[str, Any], job_pipe: int, verdict_pipe: int) -> NoReturn:
    """Run the tests and end. The candidate is forked before the tests are read, so its memory never holds them."""
    verdict: dict[str, Any] = {"passed": False, "why": "the tests did not end"}
    try:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        build_root(limits["root"], limits["disk_bytes"])
        drop_privileges()
        resource.setrlimit(resource.RLIMIT_AS, (2 * limits["memory_bytes"],) * 2)
        requests, answers = os.pipe(), os.pipe()
        if os.fork() == 0:
            run_candidate(limits, requests[0], answers[1])
        os.close(requests[0])
        os.close(answers[1])
        with os.fdopen(job_pipe, "rb") as file:
            job = json.loads(file.read())
        verdict = test(job, Proxy(requests[1], answers[0], time.monotonic() + limits["seconds"]))
    except Refused as error:
        verdict = {"refused": str(error)}
    except BaseException as error:
        verdict = {"passed": False, "why": f"{type(error).__name__}: {str(error)[:200]}"}
    finally:
        answer(verdict_pipe, verdict)
        os._exit(0)  # ends every other process of the namespace too


def build_root(place: str, disk_bytes: int) -> None:
    """Change the root to a file system with the standard library, read-only, and an empty writable folder."""
    mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    mount("tmpfs", place, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk_bytes},nr_inodes=4096,mode=755")
    for path in dict.fromkeys(map(Path, (*_LIBRARIES, *sys.path))):
        target = Path(f"{place}{path}")
        if path.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path.readlink())
        elif path.is_dir() and not target.exists():
            target.mkdir(parents=True)
            mount(str(path), str(target), None, _MS_BIND)
            mount(None, str(target), None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    Path(place + _WORK).mkdir()
    if os.geteuid() == 0:
        os.chown(place + _WORK, _NOBODY, _NOBODY)
    os.chroot(place)
    os.chdir(_WORK)


def drop_privileges() -> None:
    """Drop every capability for good. A process in a chroot cannot make a user namespace to regain one."""
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails after the kernel's last capability
    call("no new privileges", _libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.geteuid() == 0 and sys.platform == "linux":
        # The kernel does not enforce the limit of processes on root.
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION, 0))
    call("dropping capabilities", _libc.capset, header, ctypes.create_string_buffer(24))
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the change of user reset it
    prctl(_PR_SET_DUMPABLE, 0)  # no other process can trace the tester


class Proxy:
    """Calls the candidate's function in the candidate's process. Arguments and results are Python literals."""

    def __init__(self, requests: int, answers: int, deadline: float) -> None:
        self._requests, self._answers, self._deadline = requests, answers, deadline

    def define(self, code: str, entry_point: str) -> None:
        """Run the generated code, which must define the function."""
        self._ask([code, entry_point])

    def __call__(self, *arguments: Any) -> Any:
        text = self._ask(arguments)
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise Failed("the result is not a plain value") from error

    def _ask(self, values: Any) -> str:
        try:
            send(self._requests, b"", repr(values))
        except OSError as error:
            raise Failed("the code ended its process") from error
        kind, size = struct.unpack("<cI", self._read(5))
        if size > _MESSAGE_BYTES:
            raise Failed("the result is too large")
        text = self._read(size).decode(errors="replace")
        if kind != b"r":
            raise Failed(text[:200])
        return text

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise Failed("ran past its time")
            block = os.read(self._answers, count - len(data))
            if not block:
                raise Failed("the code ended its process, or ran past its limits")
            data += block
        return data


def test(job: dict[str, Any], candidate: Proxy) -> dict[str, Any]:
    """Run the data set's tests. The prompt, also of the data set, defines their helpers."""
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        candidate.define(job["code"], job["entry_point"])
        exec(job["prompt"], names)  # noqa: S102
        names[job["entry_point"]] = candidate
        exec(job["tests"], names)  # noqa: S102
        names["check"](candidate)
    except Failed as error:
        return {"passed": False, "why": str(error)}
    except AssertionError:
        return {"passed": False, "why": "a test failed"}
    except Exception as error:
        return {"passed": False, "why": f"a test failed: {type(error).__name__}"}
    return {"passed": True, "why": ""}


def run_candidate(limits: dict[str, Any], requests: int, answers: int) -> NoReturn:
    """Run the generated code, then answer calls of its function until the tester ends."""
    try:
        keep = {0, 1, 2, requests, answers}
        for number in range(64):
            if number not in keep:
                with suppress(OSError):
                    os.close(number)
        limit(limits)
        code, entry_point = receive(requests)
        names: dict[str, Any] = {"__name__": "candidate"}
        try:
            exec(compile(code, "candidate", "exec"), names)  # noqa: S102
            function = names[entry_point]
        except BaseException as error:
            send(answers, b"e", f"{type(error).__name__} when it was defined")
            os._exit(1)
        send(answers, b"r", "")
        while True:
            arguments = receive(requests)
            try:
                send(answers, b"r", repr(function(*arguments)))
            except BaseException as error:
                send(answers, b"e", f"{type(error).__name__} when it was called")
    finally:
        os._exit(1)


def limit(limits: dict[str, Any]) -> None:
    for what, most in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, limits["seconds"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 1),
    ):
        resource.setrlimit(what, (most, most))


def send(pipe: int, kind: bytes, text: str) -> None:
    data = text.encode(errors="replace")
    data = kind + struct.pack("<I", len(data)) + data
    while data:
        data = data[os.write(pipe, data) :]


def receive(pipe: int) -> Any:
    """Read the next literal from the tester."""
    with os.fdopen(os.dup(pipe), "rb", buffering=0) as file:
        parts = [b"", b""]
        for index in range(2):
            count = 4 if index == 0 else struct.unpack("<I", parts[0])[0]
            while len(parts[index]) < count:
                block = file.read(count - len(parts[index]))
                if not block:
                    os._exit(0)
                parts[index] += block
    return ast.literal_eval(parts[1].decode())


def answer(pipe: int, verdict: dict[str, Any]) -> None:
    os.write(pipe, json.dumps(verdict).encode())
    os.close(pipe)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    call(f"mounting {target}", _libc.mount, *words, flags, None if data is None else data.encode())


def prctl(option: int, value: int) -> None:
    call(f"prctl {option}", _libc.prctl, option, value, 0, 0, 0)


def call(what: str, function: Any, *arguments: Any) -> None:
    if function(*arguments) != 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
