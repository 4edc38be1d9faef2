"""A sealed artifact: a directory that is written once, checked whenever it is opened, and never written again.

A manifest proves integrity, not origin: whoever can change the files can change the manifest too. `verify(expect=...)`
compares with a hash that came another way. Knows nothing of what targets put into their files.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from edgekit.errors import DamagedArtifact, InvalidInput, OutOfSpace, clip
from edgekit.facts import read_fact, write_fact
from edgekit.files import boot_id, disk_full, file_sha256, free_bytes, sync_folder, write_file
from edgekit.frozen import Frozen
from edgekit.plan import Plan
from edgekit.reading import parse_json, read_bytes, validate

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
_MAX_MANIFEST_BYTES = 32 << 20
_MAX_FILES = 4096
_DAY_S = 86_400
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,127}){0,3}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class FileFact(Frozen):
    """What a file must be."""

    bytes: int
    sha256: str


class Manifest(Frozen):
    """What an artifact is: the plan it was made by, its files, and how it was checked."""

    version: int
    plan: Plan
    weights_sha256: str  # of the neutral weights it was packed from
    files: dict[str, FileFact]
    tools: dict[str, str]
    self_check: str


class Artifact(NamedTuple):
    """An artifact whose files were found whole."""

    folder: Path
    manifest: Manifest
    sha256: str  # of the manifest's bytes, and so of everything

    @property
    def plan(self) -> Plan:
        return self.manifest.plan


def seal(
    staging: Path, final: Path, plan: Plan, *, weights_sha256: str, tools: dict[str, str], self_check: str
) -> Artifact:
    """Write the manifest into `staging`, make everything durable, and rename it to `final`, which must not exist."""
    files: dict[str, FileFact] = {}
    for path in sorted(_regular_files(staging)):
        name = path.relative_to(staging).as_posix()
        if not _NAME.fullmatch(name):
            raise InvalidInput(f"{final}: a target wrote a file named {clip(name)}, which an artifact cannot hold")
        files[name] = FileFact(bytes=path.stat().st_size, sha256=file_sha256(path))
        with disk_full(path, path.stat().st_size), path.open("rb") as file:
            os.fsync(file.fileno())
    manifest = Manifest(
        version=MANIFEST_VERSION,
        plan=plan,
        weights_sha256=weights_sha256,
        files=files,
        tools=dict(sorted(tools.items())),
        self_check=self_check,
    )
    data = (manifest.model_dump_json(indent=1) + "\n").encode()
    write_file(staging / MANIFEST, data)
    for folder in [path for path in staging.rglob("*") if path.is_dir()] + [staging]:
        sync_folder(folder)
    try:
        staging.rename(final)
    except OSError as error:
        raise InvalidInput(
            f"{final}: cannot be written: {error.strerror}; choose a path that does not exist"
        ) from error
    sync_folder(final.parent)
    return Artifact(final, manifest, hashlib.sha256(data).hexdigest())


def open_artifact(path: str | Path) -> Artifact:
    """The artifact at `path`: sizes are checked always, hashes the first time since the machine was started."""
    artifact = read_manifest(path)
    found = _fingerprint(artifact)
    if read_fact(artifact.sha256, "verified") != {"fingerprint": found}:
        check_hashes(artifact)
        write_fact(artifact.sha256, "verified", {"fingerprint": found})
    return artifact


def verify(
    path: str | Path, *, expect: str | None = None, progress: Callable[[float, float, str], None] | None = None
) -> Artifact:
    """Check every byte; with `expect`, also that this is the artifact with that hash and no other."""
    artifact = read_manifest(path)
    if expect is not None and expect.removeprefix("sha256:").lower() != artifact.sha256:
        if not _SHA256.fullmatch(expect.removeprefix("sha256:").lower()):
            raise InvalidInput(f"--expect {clip(expect)} is not a sha256: 64 hexadecimal digits are needed")
        raise DamagedArtifact(f"{path}: its hash is {artifact.sha256}, expected {expect}; it is another artifact")
    check_hashes(artifact, progress)
    return artifact


def read_manifest(path: str | Path) -> Artifact:
    """The artifact at `path`: its manifest is understood, its files are there and have their sizes."""
    folder = Path(path)
    if not folder.is_dir():
        kind = "is not a directory" if folder.exists() else "does not exist"
        raise InvalidInput(f"{folder}: {kind}; an artifact is the directory that `edgekit export -o` wrote")
    place = folder / MANIFEST
    if not place.exists():
        raise InvalidInput(f"{folder}: holds no {MANIFEST}, so it is not an artifact; `edgekit export` makes one")
    data = read_bytes(place, _MAX_MANIFEST_BYTES)
    version = parse_json(data, str(place)).get("version")
    if not isinstance(version, int):
        raise InvalidInput(f"{place}: has no version, so it is no manifest of an artifact; `edgekit export` makes one")
    if version > MANIFEST_VERSION:
        raise InvalidInput(
            f"{place}: manifest version {clip(version)}, this edgekit reads up to {MANIFEST_VERSION}; upgrade edgekit"
        )
    manifest = validate(data, Manifest, str(place))
    _check_files(folder, manifest)
    return Artifact(folder, manifest, hashlib.sha256(data).hexdigest())


def check_hashes(artifact: Artifact, progress: Callable[[float, float, str], None] | None = None) -> None:
    """Every file has the bytes that the manifest says."""
    total = sum(fact.bytes for fact in artifact.manifest.files.values())
    done = 0
    for name, fact in artifact.manifest.files.items():
        if progress:
            progress(done, total, name)
        if file_sha256(artifact.folder / name) != fact.sha256:
            raise DamagedArtifact(
                f"{artifact.folder / name}: its bytes are not those that were sealed; export it again"
            )
        done += fact.bytes
    if progress:
        progress(total, total, "verified")


def staging_for(final: Path, needed_bytes: int) -> Path:
    """An empty directory beside `final` to write a folder into; refused early where it exists or cannot fit.

    What processes left there when they were killed is removed first.
    """
    if final.exists() or final.is_symlink():
        raise InvalidInput(f"{final}: exists already; nothing is ever overwritten: choose another path or remove it")
    mark = f".{final.name}."
    _remove_left(final.parent, mark)
    staging = final.parent / f"{mark}{boot_id()[:8]}.{os.getpid()}.part"
    free = free_bytes(final.parent)
    if free < needed_bytes:
        raise OutOfSpace(str(final), needed_bytes, free)
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise InvalidInput(f"{final.parent}: cannot be written: {error.strerror}; choose another path") from error
    return staging


def _remove_left(folder: Path, mark: str) -> None:
    for path in folder.glob(f"{glob.escape(mark)}*.part") if folder.is_dir() else ():
        boot, _, process = path.name.removeprefix(mark).removesuffix(".part").partition(".")
        if process.isdecimal() and not _may_be_written(path, boot, int(process)):
            shutil.rmtree(path, ignore_errors=True)


def _may_be_written(path: Path, boot: str, process: int) -> bool:
    """Of another boot, or of a machine that shares the disk, nobody can say; a day without a change says enough."""
    if boot == boot_id()[:8]:
        return _is_alive(process)
    try:
        newest = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
    except OSError:
        return True
    return time.time() - newest < _DAY_S


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # it is somebody else's
    return True


def _regular_files(folder: Path) -> list[Path]:
    found = []
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DamagedArtifact(f"{path}: only regular files may stand in an artifact")
        if path.is_file():
            found.append(path)
            if len(found) > _MAX_FILES:
                raise DamagedArtifact(f"{folder}: more than {_MAX_FILES} files")
    return found


def _check_files(folder: Path, manifest: Manifest) -> None:
    for name, fact in manifest.files.items():
        if not _NAME.fullmatch(name) or ".." in name or name == MANIFEST:
            raise DamagedArtifact(f"{folder}: the manifest names {clip(name)}, which cannot be a file of an artifact")
        if not _SHA256.fullmatch(fact.sha256):
            raise DamagedArtifact(f"{folder}: the manifest's hash of {clip(name)} is not a sha256")
        path = folder / name
        parts = [folder.joinpath(*Path(name).parts[:count]) for count in range(1, len(Path(name).parts))]
        if any(part.is_symlink() for part in parts):
            raise DamagedArtifact(f"{path}: stands behind a link; only regular files may stand in an artifact")
        try:
            info = path.lstat()
        except OSError as error:
            raise DamagedArtifact(f"{path}: is missing; export or copy the artifact again") from error
        # A second name for the same bytes lets somebody else rewrite them after they were checked.
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            raise DamagedArtifact(f"{path}: is a link; copy the artifact so that its files are its own")
        if info.st_size != fact.bytes:
            raise DamagedArtifact(
                f"{path}: has {info.st_size:,} bytes, the manifest says {fact.bytes:,}; copy it again"
            )
    known = {folder / name for name in manifest.files} | {folder / MANIFEST}
    for path in _regular_files(folder):
        if path not in known:
            raise DamagedArtifact(
                f"{path}: is not in the manifest; an artifact is never written again: remove this file"
            )


def _fingerprint(artifact: Artifact) -> str:
    """Changes when a file was replaced or rewritten after its hash was checked, or the machine was started again."""
    parts = [boot_id(), str(artifact.folder.resolve())]
    for name in sorted(artifact.manifest.files):
        info = (artifact.folder / name).stat()
        parts.append(f"{name}:{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
