"""Folders that are written under another name first, so that they are whole or absent under their own."""

from __future__ import annotations

import glob
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from edgekit.common.files import boot_id, copy_file, disk_full, free_bytes, sync_folder
from edgekit.common.system import folder_alone
from edgekit.errors import InvalidInput, OutOfSpace

_DAY_S = 86_400


def refuse_existing(output: Path) -> None:
    """Refuse to write where something lies already."""
    if output.exists() or output.is_symlink():
        raise InvalidInput(f"{output}: exists already; nothing is ever overwritten: choose another path or remove it")


def copy_folder(folder: Path, names: Iterable[str], output: Path) -> None:
    """Copy these files of a folder to `output`, which must not exist; a failure leaves nothing there."""
    names = list(names)
    needed = sum((folder / name).stat().st_size for name in names)
    staging = staging_for(output, needed)
    try:
        with disk_full(output, needed):
            for name in names:
                copy_file(folder / name, staging / name)
            sync_folder(staging)
        refuse_existing(output)
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_folder(output.parent)


def staging_for(final: Path, needed_bytes: int) -> Path:
    """Create an empty directory in the parent of `final` to write a folder into.

    Removes the directories of killed processes first. Raises `InvalidInput` if `final` exists or another process on
    this machine is writing it, and `OutOfSpace` if `needed_bytes` do not fit.
    """
    refuse_existing(final)
    start = f".{final.name}."
    _remove_abandoned(final, start)
    staging = final.parent / f"{start}{boot_id()[:8]}.{os.getpid()}.part"
    free = free_bytes(final.parent)
    if free < needed_bytes:
        raise OutOfSpace(str(final), needed_bytes, free)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with folder_alone(final.parent, may_wait=True):
            _remove_abandoned(final, start)  # refuses if another process began since the first look
            staging.mkdir()
    except OSError as error:
        raise InvalidInput(f"{final.parent}: cannot be written: {error.strerror}; choose another path") from error
    return staging


def _remove_abandoned(final: Path, start: str) -> None:
    """Remove the staging directories of dead processes; refuse `final` if a living process of this machine has one."""
    for path in final.parent.glob(f"{glob.escape(start)}*.part") if final.parent.is_dir() else ():
        boot, _, process = path.name.removeprefix(start).removesuffix(".part").partition(".")
        if not process.isdecimal():
            continue
        is_ours = boot == boot_id()[:8]  # else of another boot, or another machine on a shared disk
        if is_ours and int(process) == os.getpid():
            continue
        if is_ours and _is_alive(int(process)):
            raise InvalidInput(f"{final}: process {process} is writing it now; wait for it or choose another path")
        if is_ours or _is_older_than_a_day(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_older_than_a_day(path: Path) -> bool:
    try:
        newest = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
    except OSError:
        return False
    return time.time() - newest >= _DAY_S


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # it belongs to another user
    return True
