"""Generated code in the sandbox: correct code passes, and hostile code can only fail."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from edgekit.apps.bench.tasks import code_sandbox
from edgekit.apps.bench.tasks.code_sandbox import CodeLimits, CodeVerdict, run_tests
from edgekit.errors import Unsupported

PROMPT = 'def double(x):\n    """Twice x."""\n'
TESTS = """
def check(candidate):
    assert candidate(2) == 4
    assert candidate([1]) == [1, 1]
    assert abs(candidate(1.5) - 3.0) < 1e-6
"""
LIMITS = CodeLimits(seconds=4, memory_bytes=256 << 20)


def run(code: str, tests: str = TESTS) -> CodeVerdict:
    return run_tests(code, PROMPT, tests, "double", LIMITS)


@pytest.fixture(scope="module", autouse=True)
def _isolated() -> None:
    try:
        run("def double(x): return x")
    except Unsupported as error:
        pytest.skip(str(error))


def test_right_code_passes_and_wrong_code_fails() -> None:
    assert run("def double(x):\n    return x + x\n") == CodeVerdict(True, "")
    assert run("def double(x):\n    return x\n") == CodeVerdict(False, "a test failed")
    assert "SyntaxError" in run("def double(x:\n").why
    assert "KeyError" in run("def triple(x): return x").why
    assert "ZeroDivisionError" in run("def double(x): return 1 / 0").why


def test_the_standard_library_is_there_and_site_packages_are_not() -> None:
    imports = "import math, re, hashlib, collections, itertools, heapq, random, decimal, ctypes\n"
    assert run(imports + "def double(x):\n    return x + x\n").passed
    assert "ModuleNotFoundError" in run("import numpy\ndef double(x): return x + x").why


def test_values_pass_as_plain_literals() -> None:
    tests = """
def check(candidate):
    for value in [(1, [2.5, None]), {"a": {1, 2}}, "naïve 🙂", b"x", True, -1, 1e300, set(), (), 10**50]:
        assert candidate(value) == value and type(candidate(value)) is type(value)
"""
    assert run("def double(x): return x", tests).passed
    for result in ("object()", "float('nan')", "[" * 4000 + "]" * 4000):
        assert not run(f"def double(x): return {result}").passed


HOSTILE = {
    "infinite loop": "while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "allocation": "x = bytearray(8 << 30)",
    "endless list": "x = []\nwhile True: x += [x] * 100000",
    "fork": "import os\nif os.fork() == 0: os._exit(0)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "threads": "import threading, time\nfor _ in range(9): threading.Thread(target=time.sleep, args=(99,)).start()",
    "os._exit": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "abort": "import os\nos.abort()",
    "fake success": """
import os
for number in range(256):
    try: os.write(number, b'{"passed": true, "why": ""}')
    except OSError: pass
""",
    "a result that equals all": "class All:\n    def __eq__(self, other): return True\ndef double(x): return All()",
    "no literal": "class R:\n    def __repr__(self): return 'open(1)'\ndef double(x): return R()",
    "huge result": "def double(x): return 'a' * (64 << 20)",
    "deep result": "class D:\n    def __repr__(self): return '(' * 500000\ndef double(x): return D()",
    "signals": "import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, 9)",
    "own limits": "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (99, 99))",
    "big file": "open('big', 'wb').write(bytes(4 << 20))",
    "many files": "for i in range(99): open(str(i), 'wb').write(bytes(1 << 20))",
    "exec": "import os, sys\nos.execv('/bin/sh', ['sh', '-c', 'true'])",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_only_fails(name: str) -> None:
    began = time.monotonic()
    verdict = run(HOSTILE[name] if "def double" in HOSTILE[name] else HOSTILE[name] + "\ndef double(x): return None")
    assert not verdict.passed and verdict.why
    assert time.monotonic() - began < LIMITS.seconds + 15


def test_nothing_outside_can_be_read_or_written(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    tmp_path.chmod(0o777)
    reads = f"open({str(secret)!r}).read()\n"
    assert "FileNotFoundError" in run(reads + "def double(x): return x + x").why
    for path in ("/etc/passwd", "/proc/self/status", "/dev/null", "/home"):
        code = f"import os\ndef double(x):\n    assert not os.path.exists({path!r})\n    return x + x"
        assert run(code).passed, path
    library = os.__file__
    for path in (str(tmp_path / "new"), f"{library}.new", "/new", "/usr/lib/new", "../new"):
        code = f"try: open({path!r}, 'w')\nexcept OSError:\n    def double(x): return x + x"
        assert run(code).passed, path
    assert list(tmp_path.iterdir()) == [secret]
    assert run("open('mine', 'w').write('x')\ndef double(x): return x + x").passed


def test_sandbox_has_no_network(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\ndef double(x): return x + x"
        assert "OSError" in run(code).why or "Refused" in run(code).why
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    name = "\0edgekit-test"  # abstract sockets belong to the network namespace
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        code = f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})\ndef double(x): return x + x"
        assert "Refused" in run(code).why


def test_privileges_cannot_be_regained() -> None:
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
refused = [libc.unshare(0x10000000) != 0, libc.mount(b"tmpfs", b"/work", b"tmpfs", 0, None) != 0]
refused.append(libc.chroot(b"/") != 0)
import os
try: os.setuid(0); refused.append(False)
except OSError: refused.append(os.getuid() != 0)
refused.append(libc.ptrace(16, 1, 0, 0) != 0)
def double(x): return x + x if all(refused) else refused
"""
    assert run(code).passed


def test_the_tests_are_not_in_the_memory_of_the_code() -> None:
    code = """
import gc, sys
seen, frame = [], sys._getframe()
while frame:
    seen.append(repr(frame.f_locals)); frame = frame.f_back
text = "".join(seen) + "".join(repr(each) for each in gc.get_objects() if isinstance(each, (dict, list)))
def double(x): return x + x if "candi" + "date(2) ==" not in text else None
"""
    assert run(code).passed


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_SECRET", "x")
    code = "import os\ndef double(x): return x + x if 'EDGEKIT_SECRET' not in os.environ else None"
    assert run(code).passed


def test_sandbox_leaves_no_processes_or_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # stands in the command line of every process
    run("import ctypes\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nwhile True: pass")
    alive = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _bytes_of(path)]
    assert alive == [] and list(tmp_path.iterdir()) == []


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.skipif(os.geteuid() != 0, reason="every other test runs as an ordinary user already")
@pytest.mark.parametrize(
    ("code", "passed"),
    [
        ("def double(x): return x + x", True),
        ("import os\nos.fork()\ndef double(x): return x + x", False),
        ("open('/etc/passwd')\ndef double(x): return x + x", False),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)\ndef double(x): return x + x", False),
        ("import ctypes\nassert ctypes.CDLL(None).unshare(1 << 28)\ndef double(x): return x + x", True),
    ],
    ids=["right", "fork", "file", "network", "namespace"],
)
def test_an_ordinary_user_is_isolated_by_a_user_namespace(code: str, passed: bool) -> None:
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("no interpreter that every user may run")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(shutil.copy(code_sandbox.__file__.replace("code_sandbox", "sandbox_program"), folder))
        root = Path(folder) / "root"
        root.mkdir()
        for path in (Path(folder), program, root):
            path.chmod(0o755)
        limits = json.dumps({**LIMITS._asdict(), "root": str(root)})
        job = json.dumps({"code": code, "prompt": PROMPT, "tests": TESTS, "entry_point": "double"})
        nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
        words = [python, "-I", "-S", str(program), limits]
        done = subprocess.run(words, input=job.encode(), capture_output=True, env={}, cwd="/", check=True, **nobody)
    verdict = json.loads(done.stdout)
    if "refused" in verdict:
        pytest.skip(verdict["refused"])
    assert verdict["passed"] is passed, verdict


def test_code_is_refused_without_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Unsupported, match="on Linux only"):
        run("def double(x): return x")
    monkeypatch.undo()
    monkeypatch.setattr(code_sandbox, "_run", lambda *_: {"refused": "user namespaces: Operation not permitted"})
    with pytest.raises(Unsupported, match="cannot be isolated here"):
        run("def double(x): return x")
