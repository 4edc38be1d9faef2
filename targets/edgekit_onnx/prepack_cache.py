"""A cache of weights packed for this CPU's kernels, so that they are mapped instead of packed again at every start.

onnxruntime packs weights into private memory when it opens a graph. Saved once in that form, they are mapped from disk
as clean pages that processes share. The form depends on the CPU and on onnxruntime's version, so it is made on each
machine. The original bytes must stay in the file, because onnxruntime compares with them.

`EDGEKIT_PACKED` bounds the cache (`EDGEKIT_PACKED=8GiB`) or turns it off (`EDGEKIT_PACKED=off`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.common.content_store import ContentStore, Hold, packed_limit
from edgekit.common.files import file_sha256, free_bytes, home, write_file
from edgekit.common.free_memory import free_memory
from edgekit.common.log import log, slow
from edgekit.common.machine_facts import is_marked, machine_key, mark
from edgekit.common.proc import cpuinfo
from edgekit.common.units import show_bytes
from edgekit.errors import DamagedArtifact, DoesNotFit, EdgekitError, InvalidInput
from edgekit_onnx.data_file import DATA_FILE
from edgekit_onnx.memory import packed_share
from edgekit_onnx.sessions import arithmetic

LAYOUT = 1  # raise it whenever the format of the cache changes
MANIFEST = "packed.json"
# Private memory of the process that packs: 34 MB and 1.0 to 1.5 times the weights were measured.
_PACKING_BYTES = 40 << 20
_PACKING_SHARE = 1.6
_SAID_BYTES = 32 << 20  # of weights; fewer are packed in a fraction of a second, which commands do not mention
_ALIGNMENT = 64  # alignment of packed memory, on which its layout depends
_EXTERNAL = "session.optimized_model_external_initializers"


class PackedFolder(NamedTuple):
    """The folder of the packed graphs; None if the exported ones must be opened, with a note that says why."""

    folder: Path | None
    note: str = ""
    hold: Hold | None = None  # keeps the folder in the cache


def get_or_build(key: str, files: Path, save: Callable[[Path], None], *, own: bool) -> PackedFolder:
    """Return the packed graphs. If the cache lacks them, `save` writes and checks them in a folder."""
    try:
        limit = packed_limit()
        if limit == 0:
            return PackedFolder(None, "packed weights are turned off (EDGEKIT_PACKED)")
        features = " ".join(sorted(cpuinfo("flags", "Features").split()))  # kernels choose their layout by them
        name = hashlib.sha256(f"{LAYOUT} {key} {machine_key()} {features} {arithmetic()}".encode()).hexdigest()
        store = ContentStore(home() / "packed")

        def make(folder: Path) -> None:
            try:
                _check_room(store, name, limit, files, own=own)
                _make(folder, name, save)
            except BaseException:
                shutil.rmtree(folder)  # a half of packed weights is worth nothing to a later run
                raise

        folder, hold = store.hold(name, make, _check_whole, lambda holder: log.info("%s packs the same", holder))
        return PackedFolder(folder, hold=hold)
    except DoesNotFit as refused:
        return PackedFolder(None, str(refused))
    except (OSError, EdgekitError) as error:
        cause = error.__cause__ if isinstance(error, InvalidInput) else error
        reason = (isinstance(cause, OSError) and cause.strerror) or str(error)
        return PackedFolder(
            None, f"packed weights cannot be kept in {home() / 'packed'}: {reason}; weights are copied instead"
        )


def _check_room(store: ContentStore, name: str, limit: int, files: Path, *, own: bool) -> None:
    """Make room in the cache. Raises `DoesNotFit` where limit, disk or memory do not allow the packed weights."""
    weights = (files / DATA_FILE).stat().st_size
    needed = int(weights * packed_share(own))
    if needed > limit:
        raise DoesNotFit(f"packed weights would take {show_bytes(needed)}, EDGEKIT_PACKED allows {show_bytes(limit)}")
    for left in store.root.glob(".*.part"):
        store.drop(left)  # of a killed process; stays while a process makes it
    store.keep_within(limit - needed, spare=name)
    free = free_bytes(store.root)
    if free < needed:
        raise DoesNotFit(f"packed weights need {show_bytes(needed)} in {store.root}, {show_bytes(free)} are free")
    working, memory = _PACKING_BYTES + int(weights * _PACKING_SHARE * (not own)), free_memory()
    if memory is not None and memory.bytes < working:
        raise DoesNotFit(
            f"packing the weights takes {show_bytes(working)} of memory, once, and {show_bytes(memory.bytes)} are "
            f"free ({memory.source}); weights are copied instead"
        )
    say = slow.info if weights >= _SAID_BYTES else log.info
    say("packing %s of weights for this processor, once; later openings map them (EDGEKIT_PACKED)", show_bytes(weights))


def saving(chosen: Any, folder: Path, name: str) -> Any:
    """Return session options that also save the graph with its packed weights."""
    chosen.optimized_model_filepath = str(folder / f"{name}.onnx")
    chosen.add_session_config_entry(f"{_EXTERNAL}_file_name", f"{name}.bin")
    # onnxruntime 1.31.1 corrupts scales inside the graph if their weights are outside, so all but the smallest
    # initializers go outside. Shapes for Reshape must stay inside, or the saved graph does not open.
    chosen.add_session_config_entry(f"{_EXTERNAL}_min_size_in_bytes", str(_ALIGNMENT))
    chosen.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    return chosen


def align(path: Path) -> None:
    """Rewrite the data file of a saved graph so that every piece starts at a multiple of 64 bytes.

    onnxruntime writes pieces one after another. A vocabulary that is no multiple of 16 shifts the pieces after it,
    and packed weights that are mapped at another alignment than they were made for are read wrongly.
    """
    import onnx

    model = onnx.load_model(path, load_external_data=False)
    external = [tensor for tensor in model.graph.initializer if tensor.external_data]
    entries = [{entry.key: entry for entry in tensor.external_data} for tensor in external]
    packed = [entry for each in entries for key, entry in each.items() if key.startswith("prepacked")]
    if all(int(part.split(";")[0]) % _ALIGNMENT == 0 for entry in packed for part in entry.value.split("|")[1:]):
        return
    data = path.with_suffix(".bin")
    aligned = data.with_suffix(".aligned")
    with data.open("rb") as source, aligned.open("wb") as target:

        def move(offset: int, length: int) -> str:
            target.write(bytes(-target.tell() % _ALIGNMENT))
            start = target.tell()
            source.seek(offset)
            while length:
                block = source.read(min(length, 1 << 20))
                if not block:
                    raise _not_whole()
                target.write(block)
                length -= len(block)
            return str(start)

        for each in entries:
            each["offset"].value = move(int(each["offset"].value), int(each["length"].value))
        for entry in packed:
            name, *parts = entry.value.split("|")
            pieces = [part.split(";") for part in parts]
            moved = [[move(int(offset), int(length)), length, *rest] for offset, length, *rest in pieces]
            entry.value = "|".join([name, *(";".join(piece) for piece in moved)])
    aligned.replace(data)
    write_file(path, model.SerializeToString())


def probe(session: Any) -> NDArray[Any]:
    """Run a graph on a few fixed tokens or hidden states; equal graphs give equal bits."""
    tokens, capacity = 3, 4
    fed: dict[str, NDArray[Any]] = {
        "input_ids": np.arange(tokens, dtype=np.int64)[None],
        "types": np.zeros((1, tokens), np.int64),
        "positions": np.arange(tokens, dtype=np.int64),
        "lengths": np.array([tokens], np.int32),
        "seqlens_k": np.array([tokens - 1], np.int32),
        "total": np.array(tokens, np.int32),
        "kept": np.array([tokens], np.int64),
    }
    for name, kind, shape in ((value.name, value.type, value.shape) for value in session.get_inputs()):
        if name.startswith("mask."):
            fed[name] = np.zeros((1, 1, tokens, tokens), np.float32)
        elif name == "hidden_in":
            sizes = (1, tokens, shape[-1])[-len(shape) :]
            fed[name] = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
        elif name.endswith((".inputs", ".memory")):
            fed[name] = np.zeros((1, *shape[1:]), np.float32)
        elif name not in fed:
            numbers = np.float16 if kind == "tensor(float16)" else np.float32
            fed[name] = np.zeros((1, shape[1], capacity, shape[3]), numbers)
    # Compare the last output, since the first layer's keys do not depend on later layers.
    last = next(value.name for value in session.get_outputs() if value.name in ("hidden", "logits"))
    result: NDArray[Any] = session.run([last], {value.name: fed[value.name] for value in session.get_inputs()})[0]
    return result


def _make(folder: Path, name: str, save: Callable[[Path], None]) -> None:
    """Build in the temporary folder of entry `name`, which is renamed when all bytes are on disk."""
    for path in folder.iterdir():
        path.unlink()  # of a process that was killed
    save(folder)
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
        refuse_short(path)
    facts = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(folder.iterdir())
    }
    write_file(folder / MANIFEST, json.dumps(facts, indent=1).encode())
    mark(name, "packed", _stamp(folder, facts))  # of hashes just computed, which the next opening need not repeat


def _not_whole() -> OSError:
    return OSError(errno.ENOSPC, "the saved weights are not whole; is the disk full?")


def refuse_short(path: Path) -> None:
    """Raise `OSError` if a graph's data file is cut short, because onnxruntime does not notice a full disk."""
    import onnx

    if path.suffix != ".onnx":
        return
    graph = onnx.load_model(path, load_external_data=False).graph
    for tensor in graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            end = int(entries["offset"]) + int(entries["length"])
            if (path.parent / entries["location"]).stat().st_size < end:
                raise _not_whole()


def _check_whole(place: Path) -> None:
    if not is_whole(place):
        raise DamagedArtifact(f"{place}: its packed weights are not whole")


def is_whole(place: Path) -> bool:
    """Return True if an entry is complete: compares sizes always, and hashes if a file changed since the last check."""
    try:
        facts = json.loads((place / MANIFEST).read_bytes())
        if any((place / name).lstat().st_size != fact["bytes"] for name, fact in facts.items()):
            return False
        if is_marked(place.name, "packed", _stamp(place, facts)):
            return True
        if any(file_sha256(place / name) != fact["sha256"] for name, fact in facts.items()):
            return False
        mark(place.name, "packed", _stamp(place, facts))
        return bool(facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _stamp(path: Path, names: Iterable[str]) -> dict[str, list[list[str | int]]]:
    """Return the facts of a file that change when it is replaced or rewritten."""
    infos = [(name, (path / name).lstat()) for name in names]
    return {"stamp": [[name, info.st_ino, info.st_size, info.st_mtime_ns] for name, info in infos]}
