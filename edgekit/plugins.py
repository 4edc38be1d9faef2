"""What packages add to edgekit through entry points: targets and commands."""

from __future__ import annotations

import sys
import traceback
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from edgekit.common.log import log
from edgekit.errors import EdgekitError, TargetMissing, UnknownName

if TYPE_CHECKING:
    from edgekit.contracts.target import Target

TARGETS = "edgekit.targets"
COMMANDS = "edgekit.commands"
NATIVE_LOOP = "edgekit.native_loop"  # a `LoopOpener`: opens artifacts with the native library
SIGNATURES = "edgekit.signatures"  # checks that an artifact is signed with a trusted key, or raises UntrustedSignature
DRAFTERS = "edgekit.drafters"
KV_SCORERS = "edgekit.kv_scorers"
QUANT_METHODS = "edgekit.quant_methods"
SMOOTHING = "edgekit.smoothing"  # reads a model whose loud channels of inputs are folded into its weights
_KINDS = {TARGETS: "target", COMMANDS: "command", DRAFTERS: "drafter", KV_SCORERS: "scorer", QUANT_METHODS: "method"}


def target_names() -> list[str]:
    """Return the names of all installed targets."""
    return sorted({entry.name for entry in installed(TARGETS)})


def load_target(name: str) -> Target:
    """Return the target `name`. This imports no vendor library."""
    entries = [entry for entry in installed(TARGETS) if entry.name == name]
    if not entries:
        raise UnknownName("target", name, target_names())
    from edgekit.contracts.target import Target

    described = f"target {name} ({entries[0].value})"
    try:
        target = entries[0].load()()
    except EdgekitError:
        raise
    except Exception as error:
        raise TargetMissing(f"{described} cannot be loaded: {error}; reinstall its package") from error
    if not isinstance(target, Target):
        raise TargetMissing(f"{described} does not derive edgekit.contracts.target.Target; update its package")
    return target


def installed_commands() -> dict[str, EntryPoint]:
    """Return every command that a package adds, keyed by name. A package cannot replace a command of edgekit."""
    found = sorted(installed(COMMANDS), key=is_of_edgekit)
    return {entry.name: entry for entry in found}


def added_names(group: str) -> list[str]:
    """Return the names of what packages add to `group`, without importing it."""
    return [entry.name for entry in installed(group)]


def load_added(group: str) -> dict[str, Any]:
    """Load what packages add to `group`, keyed by name. An entry that cannot be loaded is left out with a warning."""
    return _loaded(group, tuple(sys.path))


@cache
def _loaded(group: str, path: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for entry in sorted(_entry_points(group, path), key=lambda entry: (is_of_edgekit(entry), entry.name)):
        try:
            found[entry.name] = entry.load()
        except Exception as error:
            if is_of_edgekit(entry):
                raise
            log.warning("%s %s (%s) cannot be loaded: %s; reinstall its package", group, entry.name, entry.value, error)
    return dict(sorted(found.items()))


def is_of_edgekit(entry: EntryPoint) -> bool:
    """Whether edgekit itself declares this entry point."""
    return entry.dist is not None and entry.dist.name == "edgekit"


def foreign_package_in(error: BaseException) -> str:
    """Name what another package adds, a target or command or method, that `error` passed through; else nothing."""
    entries = [(kind, entry) for group, kind in _KINDS.items() for entry in installed(group)]
    own = {"edgekit", *(entry.module.partition(".")[0] for _, entry in entries if is_of_edgekit(entry))}
    foreign = {entry.module: f"{kind} {entry.name}" for kind, entry in entries}
    frames = traceback.walk_tb(error.__traceback__)
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]
    others = [module for module in modules if module.partition(".")[0] not in own]
    by_package = {module.partition(".")[0]: name for module, name in foreign.items()}
    found = [foreign[module] for module in others if module in foreign]
    found += [by_package[package] for package in (m.partition(".")[0] for m in others) if package in by_package]
    return next(iter(found), "")  # a package may add several things: the module tells which, else its package


def load_own(group: str) -> Any:
    """Load what edgekit itself adds to `group`; another package cannot put its own there."""
    return next(entry for entry in installed(group) if is_of_edgekit(entry)).load()


def installed(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group. Python's path is read once."""
    return _entry_points(group, tuple(sys.path))


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group. Reading every package's metadata is slow, so it is done once."""
    return tuple(entry_points(group=group))
