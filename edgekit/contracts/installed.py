"""A folder that `edgekit pull` keeps up to date: one small file names the artifact in use and the one before it.

Replacing that file is the switch, so a reader sees the old artifact or the new one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.bounds import Count, Sha256, Text, Version
from edgekit.common.files import write_file
from edgekit.common.parsing import read_bytes
from edgekit.common.sealed_json import read_sealed_json, to_sealed_json
from edgekit.contracts.manifest import MANIFEST

INSTALLED = "installed.json"
VERSIONS = "versions"
_FORMAT = 1
_MAX_BYTES = 1 << 20


class InstalledArtifact(Frozen):
    """One artifact of the installation, and its release."""

    sha256: Sha256
    release: Text
    number: Count
    channel: Text


class InstallationState(Frozen):
    """The state of an installation."""

    version: Version = _FORMAT
    site: Text
    installation: Sha256  # random and never sent; decides when a staged roll-out reaches this installation
    sequence: Count  # of the newest index seen; older ones are refused
    index_sha256: Sha256
    current: InstalledArtifact | None = None
    former: InstalledArtifact | None = None
    refused: Annotated[tuple[Sha256, ...], Field(max_length=100)] = ()  # rolled back here; `pull` skips them


def read_installed(folder: Path) -> InstallationState | None:
    """Return the state of the installation in `folder`; None if there is none yet."""
    path = folder / INSTALLED
    if not path.exists():
        return None
    fix = "remove it and pull again; chunks on the disk are used again"
    return read_sealed_json(
        read_bytes(path, _MAX_BYTES), InstallationState, str(path), versions=_FORMAT, sealed_since=1, fix=fix
    )[0]


def write_installed(folder: Path, installed: InstallationState) -> None:
    """Replace the state atomically."""
    write_file(folder / INSTALLED, to_sealed_json(installed))


def folder_of(folder: Path, artifact: InstalledArtifact) -> Path:
    """Return the folder of an artifact of this installation."""
    return folder / VERSIONS / artifact.sha256


def holds_artifact(path: Path) -> bool:
    """Return True if `path` is an artifact, or an installation with one in use."""
    return (installed_folder(path) / MANIFEST).is_file()


def installed_folder(path: Path) -> Path:
    """Return the folder of the artifact in use if `path` is an installation, otherwise `path`."""
    installed = read_installed(path)
    return folder_of(path, installed.current) if installed is not None and installed.current is not None else path
