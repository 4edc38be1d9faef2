"""The catalogue of device profiles.

If several folders have a profile of one name, the first wins: folders given by the caller, the user's, the installed.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from edgekit.common.files import user_profiles
from edgekit.common.parsing import read_yaml
from edgekit.contracts.device import THIS, THIS_CPU, DeviceProfile
from edgekit.errors import InvalidInput, UnknownName, quote_short
from edgekit.plugins import installed

PROFILE_ENDINGS = (".yaml", ".yml")


def all_profiles(folders: Sequence[Path] = ()) -> dict[str, DeviceProfile]:
    """Read every installed profile and those in `folders`, keyed by name, without `this`."""
    return {name: read_profile(file) for name, file in sorted(profile_files(folders).items())}


def builtin_folder() -> Traversable:
    """Return the folder of the built-in profiles: edgekit/_profiles in a wheel, profiles/ in a checkout."""
    packaged = files("edgekit") / "_profiles"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "profiles"


def profile_sha256(profile: DeviceProfile) -> str:
    """Return a hash of a profile's facts, independent of the layout of its file."""
    return hashlib.sha256(profile.model_dump_json().encode()).hexdigest()


class UnknownDevice(UnknownName):
    """An unknown device name. The message lists only similar names, because there are many."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__("device", name, known)
        near = difflib.get_close_matches(name.lower(), known, n=4, cutoff=0.5)
        near += [other for other in sorted(known) if name and name.lower() in other and other not in near][:6]
        hint = f"did you mean {', '.join(near)}?" if near else f"{len(known)} are known"
        self.args = (
            f"unknown device {quote_short(name)}; {hint}; `edgekit devices` lists them all, and `this` is this machine",
        )


def profile_files(folders: Sequence[Path]) -> dict[str, Traversable]:
    """Return the file of every profile, keyed by name."""
    profiles: dict[str, Traversable] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InvalidInput(f"{folder}: is not a folder of profiles; check the path")
    packaged = (files(entry.value) for entry in installed("edgekit.profiles"))
    for path in (*folders, user_profiles(), builtin_folder(), *packaged):
        for file in _yaml_files(path):
            profiles.setdefault(file.name.rpartition(".")[0], file)
    return profiles


def _yaml_files(folder: Traversable) -> Iterator[Traversable]:
    try:
        inside = sorted(folder.iterdir(), key=lambda file: file.name) if folder.is_dir() else []
    except OSError as error:
        raise InvalidInput(f"{folder}: cannot be listed: {error.strerror or error}; check its permissions") from error
    for file in inside:
        if file.name.endswith(PROFILE_ENDINGS) and not file.name.startswith("."):
            yield file


def read_profile(file: Traversable) -> DeviceProfile:
    """Read one profile, a file once while it does not change; its name must equal the file's."""
    if isinstance(file, Path) and file.is_file():
        return _read_unchanged(file, file.stat().st_mtime_ns)
    return _read(file)


@lru_cache(maxsize=1024)
def _read_unchanged(file: Path, changed_ns: int) -> DeviceProfile:
    return _read(file)


def _read(file: Traversable) -> DeviceProfile:
    profile = read_yaml(file, DeviceProfile)
    stem = file.name.rpartition(".")[0]
    if profile.name in (THIS, THIS_CPU):
        raise InvalidInput(f"{file}: name: {profile.name} stands for the machine itself; choose another name")
    if profile.name != stem:
        raise InvalidInput(
            f"{file}: name: {profile.name} is not the file's name, {quote_short(stem)}; make them the same"
        )
    return profile
