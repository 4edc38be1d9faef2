"""A cache of weights packed for this processor's kernels, which are mapped instead of packed again at every start.

The form depends on the processor and on the engine's version, so it is made on each machine, once.

`EDGEKIT_PACKED` bounds the cache (`EDGEKIT_PACKED=8GiB`) or turns it off (`EDGEKIT_PACKED=off`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from edgekit.common.content_store import DEFAULT_LIMIT_BYTES, ContentStore, Hold
from edgekit.common.files import file_sha256, free_bytes, home, write_file
from edgekit.common.free_memory import free_memory
from edgekit.common.log import log, slow
from edgekit.common.machine_facts import is_marked, machine_key, mark
from edgekit.common.proc import cpuinfo
from edgekit.common.units import parse_bytes, show_bytes
from edgekit.errors import DamagedArtifact, DoesNotFit, EdgekitError, InvalidInput

LAYOUT = 2  # raise it whenever the format of the cache changes
MANIFEST = "packed.json"
# Private memory of the process that packs: 34 MB and 1.0 to 1.5 times the weights were measured with onnxruntime.
_PACKING_BYTES = 40 << 20
PACKING_SHARE = 1.6
_PACKING = "packing %s of weights for this processor, once; later openings map them (EDGEKIT_PACKED)"
_SAID_BYTES = 32 << 20  # of weights; fewer are packed in a fraction of a second, which commands do not mention
_LEAST_BYTES_PER_S = 1_000_000


class PackedFolder(NamedTuple):
    """The folder of the packed weights; None if the original ones must be opened, with a note that says why."""

    folder: Path | None
    note: str = ""
    hold: Hold | None = None  # keeps the folder in the cache


def packed_limit() -> int:
    """Return the bytes that packed weights may take in the user's cache (`EDGEKIT_PACKED`); 0: none are kept."""
    setting = os.environ.get("EDGEKIT_PACKED", "").strip()
    if setting.lower() in ("off", "0", "no", "false"):
        return 0
    return parse_bytes(setting, "EDGEKIT_PACKED") if setting else DEFAULT_LIMIT_BYTES


def time_limit_s(weights: int) -> int:
    """Return the limit for packing: a process that takes longer hangs, because slow SD cards write faster."""
    return 120 + weights // _LEAST_BYTES_PER_S


def packed_weights(
    key: str, weights: int, packed_share: float, memory_share: float, save: Callable[[Path], object]
) -> PackedFolder:
    """Return the packed weights of `key`. If the cache lacks them, `save` writes and checks them in a folder.

    By the bytes of the weights, the packed ones take `packed_share` of disk and packing `memory_share` of memory.
    """
    try:
        limit = packed_limit()
        if limit == 0:
            return PackedFolder(None, "packed weights are turned off (EDGEKIT_PACKED)")
        features = " ".join(sorted(cpuinfo("flags", "Features").split()))  # kernels choose their layout by them
        name = hashlib.sha256(f"{LAYOUT} {key} {machine_key()} {features}".encode()).hexdigest()
        store = ContentStore(home() / "packed")

        def make(folder: Path) -> None:
            try:
                _make_room(store, name, limit, int(weights * packed_share), int(weights * memory_share))
                say = slow.info if weights >= _SAID_BYTES else log.info
                say(_PACKING, show_bytes(weights))
                _make(folder, name, save)
            except BaseException:
                shutil.rmtree(folder)  # a half of packed weights is worth nothing to a later run
                raise

        folder, hold = store.hold(name, make, check_whole, lambda holder: log.info("%s packs the same", holder))
        return PackedFolder(folder, hold=hold)
    except DoesNotFit as refused:
        return PackedFolder(None, str(refused))
    except (OSError, EdgekitError) as error:
        cause = error.__cause__ if isinstance(error, InvalidInput) else error
        reason = (isinstance(cause, OSError) and cause.strerror) or str(error)
        return PackedFolder(
            None, f"packed weights cannot be kept in {home() / 'packed'}: {reason}; weights are copied instead"
        )


def _make_room(store: ContentStore, name: str, limit: int, needed: int, copies: int) -> None:
    """Make room in the cache. Raises `DoesNotFit` where limit, disk or memory do not allow the packed weights."""
    if needed > limit:
        raise DoesNotFit(f"packed weights would take {show_bytes(needed)}, EDGEKIT_PACKED allows {show_bytes(limit)}")
    for left in store.root.glob(".*.part"):
        store.drop(left)  # of a killed process; stays while a process makes it
    store.keep_within(limit - needed, spare=name)
    free = free_bytes(store.root)
    if free < needed:
        raise DoesNotFit(f"packed weights need {show_bytes(needed)} in {store.root}, {show_bytes(free)} are free")
    working, memory = _PACKING_BYTES + copies, free_memory()
    if memory is not None and memory.bytes < working:
        raise DoesNotFit(
            f"packing the weights takes {show_bytes(working)} of memory, once, and {show_bytes(memory.bytes)} are "
            f"free ({memory.source}); weights are copied instead"
        )


def _make(folder: Path, name: str, save: Callable[[Path], object]) -> None:
    """Build in the temporary folder of entry `name`, which is renamed when all bytes are on disk."""
    shutil.rmtree(folder)  # of a process that was killed
    folder.mkdir()
    save(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    facts = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in paths
    }
    write_file(folder / MANIFEST, json.dumps(facts, indent=1).encode())
    mark(name, "packed", _stamp(folder, facts))  # of hashes just computed, which the next opening need not repeat


def check_whole(place: Path) -> None:
    """Raise `DamagedArtifact` if an entry is not whole: compares sizes always, and hashes if a file changed since."""
    try:
        facts = json.loads((place / MANIFEST).read_bytes())
        is_whole = facts and all((place / name).lstat().st_size == fact["bytes"] for name, fact in facts.items())
        if is_whole and not is_marked(place.name, "packed", _stamp(place, facts)):
            is_whole = all(file_sha256(place / name) == fact["sha256"] for name, fact in facts.items())
            if is_whole:
                mark(place.name, "packed", _stamp(place, facts))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise DamagedArtifact(f"{place}: its packed weights are not whole")


def _stamp(path: Path, names: Iterable[str]) -> dict[str, list[list[str | int]]]:
    """Return the facts of a file that change when it is replaced or rewritten."""
    infos = [(name, (path / name).lstat()) for name in names]
    return {"stamp": [[name, info.st_ino, info.st_size, info.st_mtime_ns] for name, info in infos]}
