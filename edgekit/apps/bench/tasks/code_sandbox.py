"""Runs generated code against tests in processes without network or files, with limits on memory and time.

This works only on Linux, as root or with user namespaces; elsewhere code is refused rather than run with less
isolation. It is not a virtual machine: a kernel vulnerability breaks the isolation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from edgekit.common.subprocesses import kill_group
from edgekit.errors import Unsupported

_PROGRAM = Path(__file__).with_name("sandbox_program.py")
_SPARE_S = 20.0  # to start, mount and end, added to the time limit of the code
_VERDICT_BYTES = 1 << 16


class CodeLimits(NamedTuple):
    """Limits of generated code."""

    seconds: int = 10  # wall time of code and tests, and processor time of the code
    memory_bytes: int = 512 << 20
    file_bytes: int = 1 << 20  # of one file
    disk_bytes: int = 8 << 20  # of all files


class CodeVerdict(NamedTuple):
    """The outcome of the tests; `why` is empty if they passed."""

    passed: bool
    why: str


def run_tests(code: str, prompt: str, tests: str, entry_point: str, limits: CodeLimits = CodeLimits()) -> CodeVerdict:  # noqa: B008
    """Run `tests` against the function `entry_point` of the untrusted `code`.

    `prompt` and `tests` are trusted. They run in a process that the code cannot reach.
    """
    if sys.platform != "linux":
        raise Unsupported(f"generated code is run on Linux only, where it can be isolated; here: {sys.platform}")
    with tempfile.TemporaryDirectory(prefix="edgekit-code.") as root:
        Path(root).chmod(0o755)  # the code runs as another user than the owner of the folder
        job = {"code": code, "prompt": prompt, "tests": tests, "entry_point": entry_point}
        verdict = _run(limits._asdict() | {"root": root}, job, limits.seconds + _SPARE_S)
    if "refused" in verdict:
        raise Unsupported(
            f"generated code cannot be isolated here ({verdict['refused']}); "
            "run it on Linux where user namespaces are allowed"
        )
    return CodeVerdict(verdict["passed"] is True, str(verdict["why"]))


def _run(limits: dict[str, Any], job: dict[str, str], limit_s: float) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_PROGRAM), json.dumps(limits)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd=os.sep,
        start_new_session=True,
    )
    try:
        data, _ = process.communicate(json.dumps(job).encode(), timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"passed": False, "why": "ran past its time"}
    finally:
        kill_group(process)
    if not data or len(data) > _VERDICT_BYTES:
        return {"passed": False, "why": "the tests ended without a verdict"}
    verdict: dict[str, Any] = json.loads(data)
    return verdict
