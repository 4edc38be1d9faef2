"""Repeat settings that `memory_contract` measured under a limit that the system itself enforces.

    python -m examples.benchmarks.memory_group --artifact DIR --rows FILE.jsonl [--most N] [--json FILE]

Needs root, and Linux with control groups of version 1. Each setting runs from its start in a memory control group. The
limit is 1.05 of what is predicted for it, with the adapter that the artifact plans for, and for the worker that
compiles schemas. The group also counts memory of the kernel, and the pages of files that it reads first; the system
drops such pages before it kills.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from edgekit.api import prepare_openings
from edgekit.artifact.artifact import open_artifact
from edgekit.common.subprocesses import WORKER_BYTES
from examples.benchmarks.memory_contract import ASKED, CAP, predicted, rows_of

GROUPS = Path("/sys/fs/cgroup/memory")
NO_CAP = ("1099511627776", "1")  # of the child itself: predicted bytes, and the share of them that it may take


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a control group with a limit of memory."""
    group = GROUPS / f"edgekit-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        while (group / "cgroup.procs").read_text():  # workers end just after their program
            time.sleep(0.01)
        group.rmdir()


def repeated(artifact: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Run a setting again in a control group; return its limit and how it ended."""
    asked = {name: row[name] for name in ASKED if name in row}
    needed = max(row["predicted"], predicted(open_artifact(artifact).plan, asked)[0].private_bytes)
    limit = round(CAP * (needed + (WORKER_BYTES if "schemas" in row else 0)))
    command = [sys.executable, "-m", "examples.benchmarks.memory_contract", "--child", str(artifact)]
    with memory_group(limit) as group:
        done = subprocess.run(
            ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command, json.dumps(asked), *NO_CAP],
            input="go on\n",
            capture_output=True,
            text=True,
        )
        return asked | {
            "artifact": artifact.name,
            "limit": limit,
            "most": int((group / "memory.max_usage_in_bytes").read_text()),
            "refused_pages": int((group / "memory.failcnt").read_text()),
            "returncode": done.returncode,
            "said": done.stderr.strip().splitlines()[-1:],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="settings of this artifact that were measured")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=1 << 30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prepare_openings([open_artifact(arguments.artifact)])  # packing is no part of the prediction
    rows = list[dict[str, Any]]()
    for row in rows_of(arguments.rows)[arguments.first : arguments.first + arguments.most]:
        rows.append(repeated(arguments.artifact, row))
        print(json.dumps(rows[-1]), flush=True)
    ended = {
        "killed": sum(row["returncode"] < 0 for row in rows),
        "refused": sum(row["returncode"] > 0 for row in rows),
    }
    found = {"cap": CAP, "settings": len(rows), **ended, "rows": rows}
    print(json.dumps({name: value for name, value in found.items() if name != "rows"}))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
