"""The folder of an installation: locking, switching to another artifact, rollback and removal of old artifacts."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from edgekit import Artifact, open_artifact
from edgekit.common.file_lock import file_lock
from edgekit.common.files import sync_folder
from edgekit.common.parsing import read_bytes
from edgekit.common.progress import Progress
from edgekit.common.sealed_json import read_sealed_json
from edgekit.contracts.installed import (
    VERSIONS,
    InstallationState,
    InstalledArtifact,
    folder_of,
    read_installed,
    write_installed,
)
from edgekit.contracts.manifest import MANIFEST, MANIFEST_VERSION, MAX_MANIFEST_BYTES, Manifest
from edgekit.errors import EdgekitError, InvalidInput

_PART = ".part"


def alone(folder: Path, progress: Progress) -> AbstractContextManager[bool]:
    """Lock a site or an installation for changes."""

    def wait(holder: str) -> None:
        progress(0, 1, f"waiting for {holder}, which changes {folder}")

    return file_lock(folder / ".lock", wait, "choose another folder")


@contextmanager
def locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Lock the installation for changes."""
    with alone(folder, progress):
        (folder / VERSIONS).mkdir(exist_ok=True)
        yield


def new_installation(site: str) -> InstallationState:
    """Return the state of an empty installation."""
    return InstallationState(site=site, installation=secrets.token_hex(32), sequence=0, index_sha256="0" * 64)


def staging_of(folder: Path, sha256: str) -> Path:
    """Return the staging folder of an artifact that is being fetched."""
    return folder / VERSIONS / f".{sha256}{_PART}"


def remove_unfinished(folder: Path, staging: Path) -> None:
    """Remove the staging folders of all artifacts but one."""
    for path in (folder / VERSIONS).glob(f".*{_PART}"):
        if path != staging:
            shutil.rmtree(path, ignore_errors=True)


def allocated_bytes(folder: Path) -> int:
    """Return the bytes of the disk that a folder's files take; a hole in a file takes none."""
    found = [path.lstat() for path in folder.rglob("*") if path.is_file()]
    if sys.platform == "win32":
        return sum(info.st_size for info in found)
    return sum(info.st_blocks * 512 for info in found)


def switch(
    folder: Path, installed: InstallationState, new: InstalledArtifact, staging: Path | None
) -> InstallationState:
    """Make `new` the artifact in use, atomically: if the process dies, either the old or the new one is in use."""
    final = folder_of(folder, new)
    if staging is not None:
        if final.exists():
            shutil.rmtree(final)  # damaged: `pull` would have used it otherwise
        for path in [staging, *staging.rglob("*")]:
            if path.is_dir():
                sync_folder(path)
            else:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        staging.rename(final)
        sync_folder(final.parent)
    former = installed.current if installed.current and installed.current.sha256 != new.sha256 else installed.former
    changed = installed.model_copy(update={"current": new, "former": former})
    write_installed(folder, changed)
    return changed


def rollback(folder: str | Path, progress: Progress = lambda done, total, what: None) -> Artifact:
    """Check the former artifact and switch back to it; `pull` does not install the abandoned one again.

    A second rollback returns to the abandoned artifact. Raises `InvalidInput` without a former artifact, and
    `DamagedArtifact` if it is damaged.
    """
    path = Path(folder)
    installed = read_installed(path)
    if installed is None or installed.current is None:
        raise InvalidInput(f"{folder}: nothing was pulled into this folder")
    with locked(path, progress):
        installed = read_installed(path)
        assert installed is not None and installed.current is not None
        if installed.former is None:
            raise InvalidInput(f"{folder}: has no former artifact to go back to")
        former = open_artifact(folder_of(path, installed.former))
        refused = (*(each for each in installed.refused if each != installed.former.sha256), installed.current.sha256)
        update = {"current": installed.former, "former": installed.current, "refused": refused[-100:]}
        write_installed(path, installed.model_copy(update=update))
        return former


def prune(folder: str | Path, keep_bytes: int = 0) -> int:
    """Remove unused artifacts until the rest of them takes at most `keep_bytes`; return the bytes freed.

    Unfinished fetches are removed first, then the oldest artifacts, and the former one last.
    """
    path = Path(folder)
    if read_installed(path) is None:
        return 0
    with locked(path, lambda done, total, what: None):
        installed = read_installed(path)
        assert installed is not None
        return remove_others(path, installed, keep_bytes)


def remove_others(folder: Path, installed: InstallationState, keep_bytes: int | None) -> int:
    """Remove unused artifacts as `prune` does; `keep_bytes` None removes all but the former one."""
    used = folder_of(folder, installed.current) if installed.current else None
    former = folder_of(folder, installed.former) if installed.former else None
    others = [path for path in (folder / VERSIONS).iterdir() if path != used]
    others.sort(key=lambda path: (path == former, not path.name.startswith("."), path.stat().st_mtime))
    left, freed = sum(_bytes_of(path) for path in others), 0
    for path in others:
        if (keep_bytes is None and path == former) or (keep_bytes is not None and left <= keep_bytes):
            break
        size = _bytes_of(path)
        shutil.rmtree(path, ignore_errors=True)
        left, freed = left - size, freed + size
    return freed


def manifests_in(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the folder and manifest of every readable artifact of an installation, unfinished ones included."""
    for path in sorted((folder / VERSIONS).iterdir()) if (folder / VERSIONS).is_dir() else ():
        try:
            yield path, manifest_of(read_bytes(path / MANIFEST, MAX_MANIFEST_BYTES), str(path))
        except EdgekitError:
            continue


def manifest_of(data: bytes, where: str) -> Manifest:
    """Parse the bytes of a manifest."""
    fix = "publish the artifact again"
    return read_sealed_json(data, Manifest, where, versions=MANIFEST_VERSION, sealed_since=2, fix=fix)[0]


def _bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
