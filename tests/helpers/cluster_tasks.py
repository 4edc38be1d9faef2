"""What workers of a cluster are asked in tests; in a module of its own, which they can import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from edgekit.errors import OutOfSpace


def who(task: int) -> tuple[int, int, str]:
    import ray

    time.sleep(0.5)
    return task, os.getpid(), str(ray.get_runtime_context().get_node_id())


def doubled(task: int) -> int:
    if task == 3:
        raise OutOfSpace("/disk", 10, 5)
    return 2 * task


def broken(task: int) -> int:
    raise ZeroDivisionError("a bug")


def dies_once(mark: Path) -> str:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def dies(task: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
