"""Plant one wrong line at a time and see whether the tests notice: `python tests/helpers/planted_lines.py`.

The lines are in tests/data/planted_faults.yaml. A fault counts as caught if a test of `make test` in the places named
there fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import click
import yaml

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "dist", ".*_cache", ".hypothesis")


class Fault(NamedTuple):
    """A wrong line, and where a test should notice it."""

    file: str
    right: str  # found once in the file
    wrong: str
    tests: str


FAULTS = [Fault(**each) for each in yaml.safe_load((ROOT / "tests/data/planted_faults.yaml").read_text())]


def caught(fault: Fault) -> str | None:
    """Return the first failing test of a copy of the tree with this fault; None: no test noticed."""
    with tempfile.TemporaryDirectory(prefix="edgekit-planted-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        path = tree / fault.file
        path.write_text(path.read_text().replace(fault.right, fault.wrong))
        paths = os.pathsep.join(map(str, (tree, tree / "targets")))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long", "-n", "2", *fault.tests.split()]
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    return next((line[:150] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), None)


def main() -> None:
    """Plant every fault and print what happened."""
    count = 0
    for fault in FAULTS:
        count += (noticed := caught(fault)) is not None
        click.echo(f"{'caught' if noticed else 'MISSED'}  {fault.file}: {fault.wrong.strip()}  {noticed or ''}")
    click.echo(f"{count} of {len(FAULTS)} caught")


if __name__ == "__main__":
    main()
