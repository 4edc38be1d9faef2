"""Finds targets and profile folders through entry points: by name, lazily, one at a time."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from edgekit.errors import EdgekitError, TargetMissing, UnknownName
from edgekit.interfaces import Target

TARGETS, PROFILES = "edgekit.targets", "edgekit.profiles"


def target_names() -> list[str]:
    """Every installed target, built-in ones and third parties'."""
    return sorted({entry.name for entry in entry_points(group=TARGETS)})


def load_target(name: str) -> Target:
    """The target of that name; importing it imports no vendor library."""
    found: tuple[EntryPoint, ...] = tuple(entry_points(group=TARGETS, name=name))
    if not found:
        raise UnknownName("target", name, target_names())
    try:
        target: Target = found[0].load()()
    except EdgekitError:
        raise
    except Exception as error:
        raise TargetMissing(
            f"target {name} ({found[0].value}) cannot be loaded: {error}; reinstall the package that offers it"
        ) from error
    return target


def builtin_profiles() -> Traversable:
    """The wheel carries profiles/ as edgekit/_profiles; a checkout has it beside edgekit/."""
    packaged = files("edgekit") / "_profiles"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "profiles"


def profile_folders() -> list[Traversable]:
    """Where profiles stand: ours, then those of installed packages."""
    return [builtin_profiles(), *(files(entry.value) for entry in entry_points(group=PROFILES))]
