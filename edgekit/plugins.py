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
    entries = _installed(tuple(sys.path))
    own = {"edgekit", *(_package(entry.module) for entry in entries if entry.dist and entry.dist.name == "edgekit")}
    foreign = {_package(entry.module): entry.name for entry in entries if _package(entry.module) not in own}
    modules = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((foreign[_package(module)] for module in modules if _package(module) in foreign), "")


def _package(module: str) -> str:
    return module.partition(".")[0]


def load_native_loop() -> LoopOpener:
    """Return what opens artifacts with the native library. This loads no library."""
    loop: LoopOpener = import_module("edgekit_native.loop").NativeLoop
    return loop


@cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of all targets. Reading every package's metadata is slow, so it is done once."""
    return tuple(entry_points(group=TARGETS))
