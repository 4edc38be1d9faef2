"""Figures of Linux's /proc and the cgroups of this process, which limit containers. Other systems have none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

ReadText = Callable[[str], str | None]  # reads a file of /proc or /sys; None if that fails

# cgroup v1 expresses "no limit" as the largest multiple of the page size.
NO_LIMIT_BYTES = 1 << 60
_ROOT = "/sys/fs/cgroup"


def read_or_none(path: str | Path) -> str | None:
    """Return the text of a file; None if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except (OSError, ValueError):
        return None


def memory_sizes(path: Path) -> dict[str, int]:
    """Return the sizes in a file such as /proc/self/status, in bytes; empty if it cannot be read."""
    return sizes_in(read_or_none(path))


def sizes_in(text: str | None) -> dict[str, int]:
    """Return the sizes in the text of such a file, in bytes."""
    found = re.findall(r"^([^:\n]+):\s*(\d+) kB$", text or "", re.MULTILINE | re.ASCII)
    return {name: int(size) << 10 for name, size in found}


def cpuinfo(*names: str, root: Path = Path("/")) -> str:
    """Return the first line of /proc/cpuinfo that begins with one of `names`, after its colon; empty without one."""
    lines = (read_or_none(root / "proc/cpuinfo") or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def cgroup_folders(own: str, controller: str) -> list[tuple[str, bool]]:
    """Return (folder, is version 2) of every cgroup that may limit this process, innermost first.

    `own` is the text of /proc/self/cgroup. In a container that text has the host's path while the mount is the
    container's, so the mount's root is always included.
    """
    folders: list[tuple[str, bool]] = []
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        v2 = controllers == ""
        if not v2 and controller not in controllers.split(","):
            continue
        root = _ROOT if v2 else f"{_ROOT}/{controllers}"
        steps = [step for step in path.split("/") if step and step != ".."]
        folders += [("/".join([root, *steps[:count]]), v2) for count in range(len(steps), -1, -1)]
    return folders


def cgroup_memory_limits(read: ReadText) -> Iterator[tuple[int, str, bool]]:
    """Yield (bytes, file, is version 2) of every limit on the memory of this process."""
    for folder, v2 in cgroup_folders(read("/proc/self/cgroup") or "", "memory"):
        file = f"{folder}/{'memory.max' if v2 else 'memory.limit_in_bytes'}"
        limit = number_in(read(file))
        if limit is not None and 0 < limit < NO_LIMIT_BYTES:
            yield limit, file, v2


def number_in(text: str | None) -> int | None:
    """Return the number that is the whole text of a file; None for anything else."""
    word = (text or "").strip()
    return int(word) if word.isascii() and word.isdigit() else None
