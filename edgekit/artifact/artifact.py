"""A sealed artifact: a directory that is written once, checked whenever it is opened, and never written again.

A manifest proves integrity, not origin: anyone who can change the files can change the manifest too.
`verify(expect=...)` compares with a hash that was received another way.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from edgekit import plugins
from edgekit.common.base import Frozen
from edgekit.common.bounds import Text
from edgekit.common.files import boot_id, disk_full, file_sha256, is_shared, sync_folder, write_file
from edgekit.common.machine_facts import is_marked, mark, read_fact
from edgekit.common.parsing import read_bytes
from edgekit.common.sealed_json import read_sealed_json, to_sealed_json
from edgekit.contracts.installed import installed_folder
from edgekit.contracts.manifest import (
    FILE_NAME,
    MANIFEST,
    MANIFEST_VERSION,
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    MAX_SIGNATURE_BYTES,
    SIGNATURE,
    FileChunk,
    FileFact,
    Manifest,
    ModelOrigin,
    check_names,
)
from edgekit.contracts.plan import Plan
from edgekit.contracts.target import Target
from edgekit.errors import DamagedArtifact, EdgekitError, InvalidInput, TargetMissing, quote_short

if TYPE_CHECKING:
    from edgekit.formats.safetensors import TensorBytes
    from edgekit.model.heads import HeadWeights

HEAD_FOLDER = "drafter"
_DAY_S = 86_400
_SHA256 = re.compile(r"[0-9a-f]{64}")


class MadeOf(Frozen):
    """Where the model lies that an artifact was made of; kept on the machine that made it, not in the manifest."""

    path: Text


class Artifact(NamedTuple):
    """An artifact on the disk, returned by `export`: its manifest is valid, and its files have the listed sizes.

    `folder` is the path for `edgekit.open`, `sha256` the artifact's identity, `plan` what it was built by.
    """

    folder: Path
    manifest: Manifest
    sha256: str  # of the manifest, which lists the hash of every file
    is_sealed: bool = True  # False: the manifest carries no hash of itself (version 1), or there is none (a GGUF file)
    weights: Path | None = None  # a GGUF file that is opened as it is; `folder` then has its converted tokenizer
    hold: object = None  # keeps `folder` in the cache while this object exists

    @property
    def plan(self) -> Plan:
        return self.manifest.plan

    @property
    def made_of(self) -> str:
        """The model that this was made of: its path if this machine made it, else its name."""
        kept = read_fact(self.sha256, "made-of", MadeOf)
        return self.plan.model_source if kept is None else kept.path

    def target(self) -> Target:
        """Load the target that can open this artifact."""
        return plugins.load_target(self.plan.target)

    def working_target(self) -> Target:
        """Load the target. Raises `TargetMissing` if it cannot run on this machine."""
        target = self.target()
        missing = target.missing()
        if missing is not None:
            raise TargetMissing(f"{target.name}: {missing}")
        return target

    def open_head(self) -> HeadWeights:
        """Open the drafting head that is sealed with the model. Raises `DamagedArtifact`."""
        from edgekit.model.heads import read_head

        folder = self.folder / HEAD_FOLDER
        head = read_head(folder, self.plan.model)
        lacks = head.targets is None or any(name not in head.stored for name, _ in head.spec.tensors())
        if lacks or head.spec != self.plan.drafter:
            head.close()
            raise DamagedArtifact(f"{folder}: is not the head of the artifact's plan; export it again")
        return head

    def check_hashes(self, progress: Callable[[float, float, str], None] | None = None) -> None:
        """Check the hash of every file. Raises `DamagedArtifact`."""
        total = sum(fact.bytes for fact in self.manifest.files.values())
        done = 0
        for name, fact in self.manifest.files.items():
            if progress:
                progress(done, total, name)
            if file_sha256(self.folder / name) != fact.sha256:
                raise DamagedArtifact(
                    f"{self.folder / name}: its bytes are not those that were sealed; export it again"
                )
            done += fact.bytes
        if progress:
            progress(total, total, "verified")

    def fingerprint(self) -> str:
        """Return a hash that changes if a file is replaced or rewritten, or if the machine is restarted."""
        parts = [boot_id(), str(self.folder.resolve())]
        for name in sorted(self.manifest.files):
            info = (self.folder / name).stat()
            parts.append(f"{name}:{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def seal(
    staging: Path,
    final: Path,
    plan: Plan,
    *,
    weights_sha256: str,
    tools: dict[str, str],
    self_check: str,
    origin: ModelOrigin | None = None,
    describe: Callable[[Manifest], dict[str, bytes]] = lambda manifest: {},
) -> Artifact:
    """Write the manifest into `staging`, sync everything, and rename the folder to `final`, which must not exist.

    `describe` makes further files from the manifest of all others, such as a bill of materials.
    """
    files: dict[str, FileFact] = {}
    tensors = _tensor_places(plan, staging)
    for path in sorted(_regular_files(staging)):
        name = path.relative_to(staging).as_posix()
        if not FILE_NAME.fullmatch(name):
            raise InvalidInput(
                f"{final}: a target wrote a file named {quote_short(name)}, which an artifact cannot hold"
            )
        files[name] = _fact_of(path, tensors)
        with disk_full(path, path.stat().st_size), path.open("rb") as file:
            os.fsync(file.fileno())
    manifest = Manifest(
        version=MANIFEST_VERSION,
        plan=plan,
        weights_sha256=weights_sha256,
        files=files,
        tools=dict(sorted(tools.items())),
        self_check=self_check,
        origin=origin,
    )
    for name, content in describe(manifest).items():
        write_file(staging / name, content)
        files[name] = _fact_of(staging / name, [])
    manifest = manifest.model_copy(update={"files": dict(sorted(files.items()))})
    data = to_sealed_json(manifest)
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


def _tensor_places(plan: Plan, folder: Path) -> list[TensorBytes]:
    try:
        return plugins.load_target(plan.target).tensor_places(folder)
    except EdgekitError:
        # The target is not installed here, or cannot read the file: chunks need no tensor boundaries.
        return []


def _fact_of(path: Path, tensors: list[TensorBytes]) -> FileFact:
    """Return the size and hash of a file, with the hashes of its chunks."""
    from edgekit.formats.chunking import cut_file

    whole, chunks = hashlib.sha256(), []
    with path.open("rb") as file:
        for size in cut_file(path, tensors):
            data = file.read(size)
            whole.update(data)
            chunks.append(FileChunk(bytes=size, sha256=hashlib.sha256(data).hexdigest()))
    listed = tuple(chunks) if len(chunks) > 1 else ()
    return FileFact(bytes=path.stat().st_size, sha256=whole.hexdigest(), chunks=listed)


def open_artifact(path: str | Path) -> Artifact:
    """Open the artifact at `path`. Sizes are checked every time, hashes once after each boot of the machine."""
    artifact = read_manifest(path)
    verified = {"fingerprint": artifact.fingerprint()}
    if not is_marked(artifact.sha256, "verified", verified):
        artifact.check_hashes()
        mark(artifact.sha256, "verified", verified)
    return artifact


def verify(
    path: str | Path, *, expect: str | None = None, progress: Callable[[float, float, str], None] | None = None
) -> Artifact:
    """Check every byte of an artifact and, if given, that its sha256 is `expect`."""
    artifact = read_manifest(path)
    if expect is not None and expect.removeprefix("sha256:").lower() != artifact.sha256:
        if not _SHA256.fullmatch(expect.removeprefix("sha256:").lower()):
            raise InvalidInput(f"--expect {quote_short(expect)} is not a sha256: 64 hexadecimal digits are needed")
        raise DamagedArtifact(f"{path}: its hash is {artifact.sha256}, expected {expect}; it is another artifact")
    artifact.check_hashes(progress)
    return artifact


def read_manifest(path: str | Path) -> Artifact:
    """Read the artifact at `path`: check its manifest and the sizes of its files, but not their hashes."""
    folder = installed_folder(Path(path))
    if not folder.is_dir():
        kind = "is not a directory" if folder.exists() else "does not exist"
        raise InvalidInput(f"{folder}: {kind}; an artifact is the directory that `edgekit export -o` wrote")
    place = folder / MANIFEST
    if not place.exists():
        raise InvalidInput(f"{folder}: holds no {MANIFEST}, so it is not an artifact; `edgekit export` makes one")
    data = read_bytes(place, MAX_MANIFEST_BYTES)
    manifest, is_sealed = read_sealed_json(
        data,
        Manifest,
        str(place),
        versions=MANIFEST_VERSION,
        sealed_since=2,
        fix="copy the artifact again, or make it again with `edgekit export`",
    )
    _check_files(folder, manifest)
    return Artifact(folder, manifest, hashlib.sha256(data).hexdigest(), is_sealed)


def _regular_files(folder: Path) -> list[Path]:
    files = []
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise DamagedArtifact(f"{path}: an artifact may hold only regular files")
        if path.is_file():
            files.append(path)
            if len(files) > MAX_FILES:
                raise DamagedArtifact(f"{folder}: more than {MAX_FILES} files")
    return files


def _own_file(path: Path) -> os.stat_result:
    """Return the `stat` of a regular file that is not shared through hard links."""
    try:
        info = path.lstat()
    except OSError as error:
        raise DamagedArtifact(f"{path}: is missing; export or copy the artifact again") from error
    if stat.S_ISLNK(info.st_mode):
        raise DamagedArtifact(f"{path}: is a link; copy the artifact so that its files are its own")
    if not stat.S_ISREG(info.st_mode):
        kind = "a directory" if stat.S_ISDIR(info.st_mode) else "a pipe, socket or device"
        raise DamagedArtifact(f"{path}: is {kind}, not a regular file; export or copy the artifact again")
    if is_shared(path, info):
        raise DamagedArtifact(f"{path}: has {info.st_nlink} names (hard links); copy the artifact so that it has one")
    return info


def _check_files(folder: Path, manifest: Manifest) -> None:
    check_names(folder, manifest)
    for name, fact in manifest.files.items():
        path = folder / name
        parts = [folder.joinpath(*Path(name).parts[:count]) for count in range(1, len(Path(name).parts))]
        if any(part.is_symlink() for part in parts):
            raise DamagedArtifact(f"{path}: is behind a link; an artifact may hold only regular files")
        info = _own_file(path)
        if info.st_size != fact.bytes:
            raise DamagedArtifact(
                f"{path}: has {info.st_size:,} bytes, the manifest says {fact.bytes:,}; copy it again"
            )
    _own_file(folder / MANIFEST)
    known = {folder / name for name in manifest.files} | {folder / MANIFEST}
    if (folder / SIGNATURE).is_symlink() or (folder / SIGNATURE).exists():
        known.add(folder / SIGNATURE)
        if _own_file(folder / SIGNATURE).st_size > MAX_SIGNATURE_BYTES:
            raise DamagedArtifact(f"{folder / SIGNATURE}: is too large for a signature; copy the artifact again")
    for path in _regular_files(folder):
        if path not in known:
            raise DamagedArtifact(
                f"{path}: is not in the manifest; an artifact is never written again: remove this file"
            )
