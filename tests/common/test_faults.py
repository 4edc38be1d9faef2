"""Failing system calls: no partial file is opened, a retry gives the same bytes, and no process is left."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "helpers" / "fault_points.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="preloads a library that cc builds")
@pytest.mark.parametrize(
    ("operations", "most"),
    [("prune prefixes lab", 3), ("publish pull", 3), ("quantise calibrate", 1), ("export", 1)],
    ids=str,
)
def test_an_operation_survives_failing_calls(operations: str, most: int, tmp_path: Path) -> None:
    words = [word for operation in operations.split() for word in ("--operation", operation)]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words, "--most", str(most)],
        env=os.environ | {"EDGEKIT_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    cases = [int(count) for count in re.findall(r": (\d+) cases", done.stdout)]
    assert len(cases) == 8 * len(operations.split()) and sum(cases) >= 3 * len(operations.split())
