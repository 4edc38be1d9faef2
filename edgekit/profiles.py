"""Finds device profiles: by name, by path, or `this` machine, detected.

Where two folders hold one name, the first wins: folders that were named, the user's own, then the installed ones. Knows
nothing of how a machine is measured.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterator, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path

from edgekit.device import DeviceProfile
from edgekit.errors import InvalidInput, UnknownName, clip
from edgekit.plugins import profile_folders
from edgekit.reading import read_yaml

THIS, THIS_CPU = "this", "this-cpu"
_ENDINGS = (".yaml", ".yml")


def load_profile(name_or_path: str | Path, folders: Sequence[Path] = ()) -> DeviceProfile:
    """The device of that name or in that file; `this` is the machine that this runs on, `this-cpu` without its GPU."""
    text = str(name_or_path)
    if text in (THIS, THIS_CPU):
        from edgekit.detect import this_device

        return this_device(with_gpu=text == THIS)
    if isinstance(name_or_path, Path) or text.endswith(_ENDINGS) or "/" in text or os.sep in text:
        return _read(Path(text))
    found = _files(folders).get(text)
    if found is None:
        raise _Unknown(text, list(_files(folders)))
    return _read(found)


def all_profiles(folders: Sequence[Path] = ()) -> dict[str, DeviceProfile]:
    """Every profile that is installed or stands in `folders`, by name; `this` is not among them."""
    return {name: _read(file) for name, file in sorted(_files(folders).items())}


def profile_names(folders: Sequence[Path] = ()) -> list[str]:
    """The names that `load_profile` knows, without reading the files."""
    return sorted(_files(folders))


def user_folder() -> Path:
    """Where users keep profiles of their own."""
    chosen = os.environ.get("EDGEKIT_HOME")
    if chosen:
        return Path(chosen) / "profiles"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "edgekit" / "profiles"


def profile_sha256(profile: DeviceProfile) -> str:
    """The same for the same facts, however their file is laid out."""
    return hashlib.sha256(profile.model_dump_json().encode()).hexdigest()


class _Unknown(UnknownName):
    """Says the near matches instead of all names: there are dozens."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__("device", name, known)
        near = difflib.get_close_matches(name.lower(), known, n=4, cutoff=0.5)
        near += [other for other in sorted(known) if name and name.lower() in other and other not in near][:6]
        hint = f"did you mean {', '.join(near)}?" if near else f"{len(known)} are known"
        self.args = (
            f"unknown device {clip(name)}; {hint}; `edgekit devices` lists them all, and `this` is this machine",
        )


def _files(folders: Sequence[Path]) -> dict[str, Traversable]:
    found: dict[str, Traversable] = {}
    for folder in folders:
        if not folder.is_dir():
            raise InvalidInput(f"{folder}: is not a folder of profiles; check the path")
    for place in (*folders, user_folder(), *profile_folders()):
        for file in _yaml_files(place):
            found.setdefault(file.name.rpartition(".")[0], file)
    return found


def _yaml_files(folder: Traversable) -> Iterator[Traversable]:
    try:
        inside = sorted(folder.iterdir(), key=lambda file: file.name) if folder.is_dir() else []
    except OSError as error:
        raise InvalidInput(f"{folder}: cannot be listed: {error.strerror or error}; check its permissions") from error
    for file in inside:
        if file.name.endswith(_ENDINGS) and not file.name.startswith("."):
            yield file


def _read(file: Traversable) -> DeviceProfile:
    profile = read_yaml(file, DeviceProfile)
    stem = file.name.rpartition(".")[0]
    if profile.name in (THIS, THIS_CPU):
        raise InvalidInput(f"{file}: name: {profile.name} stands for the machine itself; choose another name")
    if profile.name != stem:
        raise InvalidInput(f"{file}: name: {profile.name} is not the file's name, {clip(stem)}; make them the same")
    return profile
