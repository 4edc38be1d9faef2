"""Load targets through entry points, by name."""

from __future__ import annotations

import sys
import traceback
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from edgekit.contracts.native_loop import LoopOpener
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


def foreign_target_in(error: BaseException) -> str:
    """Return the name of the target from another package whose code `error` passed through, or an empty string."""
    own = {entry.module.partition(".")[0] for entry in _installed(tuple(sys.path)) if _is_own(entry)}
    names = {
        root: entry.name
        for entry in _installed(tuple(sys.path))
        if (root := entry.module.partition(".")[0]) not in {"edgekit", *own}
    }
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((names[root] for frame in frames if (root := _package_of(frame.f_globals)) in names), "")


def _is_own(entry: EntryPoint) -> bool:
    return entry.dist is not None and entry.dist.name == "edgekit"


def _package_of(variables: dict[str, object]) -> str:
    return str(variables.get("__name__", "")).partition(".")[0]


def load_native_loop() -> LoopOpener:
    """Return what opens artifacts with the native library. This loads no library."""
    loop: LoopOpener = import_module("edgekit_native.loop").NativeLoop
    return loop


@cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of all targets. Reading every package's metadata is slow, so it is done once."""
    return tuple(entry_points(group=TARGETS))
