"""Load targets through entry points, by name."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from edgekit.contracts.target import Target
from edgekit.errors import EdgekitError, TargetMissing, UnknownName

TARGETS = "edgekit.targets"


def target_names() -> list[str]:
    """Return the names of all installed targets."""
    return sorted({entry.name for entry in _installed(tuple(sys.path))})


def load_target(name: str) -> Target:
    """Return the target `name`. This imports no vendor library."""
    entries = [entry for entry in _installed(tuple(sys.path)) if entry.name == name]
    if not entries:
        raise UnknownName("target", name, target_names())
    try:
        target: Target = entries[0].load()()
    except EdgekitError:
        raise
    except Exception as error:
        raise TargetMissing(
            f"target {name} ({entries[0].value}) cannot be loaded: {error}; reinstall its package"
        ) from error
    return target


@cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of all targets. Reading every package's metadata is slow, so it is done once."""
    return tuple(entry_points(group=TARGETS))
