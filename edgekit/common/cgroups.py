"""The cgroups of this process, whose limits apply in containers."""

from __future__ import annotations

from collections.abc import Callable

ReadText = Callable[[str], str | None]  # reads a file of /proc or /sys; None if that fails

# cgroup v1 expresses "no limit" as the largest multiple of the page size.
NO_LIMIT_BYTES = 1 << 60
_ROOT = "/sys/fs/cgroup"


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
