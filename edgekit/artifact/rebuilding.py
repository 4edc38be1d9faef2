"""Neutral weights that lie in an artifact already: the store keeps a reference, and rebuilds them when they are needed.

An artifact and its neutral weights hold the same integers. What the artifact does not give back to the bit (scales,
most norms) stays in the store, and the hash of every rebuilt file is compared. Blocks of rows are held.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from edgekit.artifact.artifact import Artifact, open_artifact
from edgekit.common.content_store import ContentStore
from edgekit.common.files import copy_file, file_sha256, write_file
from edgekit.common.sealed_json import to_sealed_json
from edgekit.common.units import show_bytes
from edgekit.contracts.neutral import (
    MANIFEST,
    NeutralManifest,
    NeutralWeights,
    bits_of,
    is_neutral,
    on_disk,
    open_held,
    read_manifest,
)
from edgekit.contracts.weights_reference import (
    BUNDLED_WEIGHTS,
    REFERENCE,
    REST,
    HeldTensor,
    Rebuild,
    WeightsReference,
    key_of,
    read_reference,
    reference_place,
    refers,
)
from edgekit.errors import DamagedArtifact, EdgekitError, InvalidInput, OutOfSpace, quote_short
from edgekit.formats.int_packing import float32_to_bf16, pack
from edgekit.formats.safetensors import TensorEntry, TensorFolder
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.quant.shards import as_stored, layout_of, parts_of, shard_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TENSORS = "rest.safetensors"
_REBUILT = ".rebuilt"  # in the folder that is being made
_BLOCK_VALUES = 1 << 20
_WITHOUT_WORK = ("none", "kept")  # methods whose weights are copied from the source again in seconds


class _Rows(NamedTuple):
    """Rows of a stored tensor from `start` on, as the artifact gives them."""

    name: str
    start: int
    values: NDArray[Any]


def free_copy(artifact: Artifact, store: ContentStore) -> int:
    """Replace the stored weights of `artifact` by a reference; return the bytes that this freed.

    Nothing changes if the artifact cannot be read back, or another process uses the weights.
    """
    key = key_of(store, artifact.manifest.weights_sha256)
    if key is None or not is_neutral(store.root / key):
        return 0
    folder, place = store.root / key, reference_place(store, key)
    whole, kept = _bytes_in(folder), 0
    try:
        with store.holding(folder) as is_there:
            if not is_there:
                return 0  # another export has freed them just now
            if read_manifest(folder).method not in _WITHOUT_WORK and not refers(BUNDLED_WEIGHTS, key):
                store.drop(place)
                store.get(place.name, partial(_write_from, artifact, folder), _check)
                kept = _bytes_in(place)
    except (EdgekitError, OSError, ValueError):  # a path that is no text, for one; the export has succeeded
        store.drop(store.root / f".{place.name}.part")
        return 0
    return 0 if store.drop(folder) else whole - kept


def free_copies(artifacts: Iterable[Artifact], store: ContentStore, announce: Callable[[str], None]) -> None:
    """Free the stored weights of fresh artifacts, and announce what that freed."""
    freed = sum(free_copy(artifact, store) for artifact in artifacts)
    if freed > 0:
        announce(
            f"{show_bytes(freed)} of the cache freed: neutral weights, which a later export reads from the artifact or "
            "copies from the model again"
        )


def rebuilding(announce: Callable[[str], None]) -> Rebuild:
    """Return the function that rebuilds weights from a reference; it announces why it could not.

    It works in a subfolder, so that what an interrupted run has quantised is kept.
    """

    def rebuild(store: ContentStore, key: str, folder: Path) -> bool:
        places = [reference_place(each, key) for each in (store, BUNDLED_WEIGHTS)]
        return any(_rebuild(place, folder, announce) for place in places if (place / REFERENCE).is_file())

    return rebuild


def _rebuild(place: Path, folder: Path, announce: Callable[[str], None]) -> bool:
    rebuilt = folder / _REBUILT
    try:
        shutil.rmtree(rebuilt, ignore_errors=True)
        reference = read_reference(place)
        artifact = open_artifact(reference.artifact)
        if artifact.sha256 != reference.artifact_sha256:
            raise DamagedArtifact(f"{artifact.folder}: is another artifact now")
        rebuilt.mkdir()
        _fill(rebuilt, place / REST, artifact, reference.held)
        _empty(folder, but=rebuilt)
        for path in sorted(rebuilt.iterdir(), key=lambda each: each.name == MANIFEST):  # the manifest is the last
            path.rename(folder / path.name)
        rebuilt.rmdir()
    except OutOfSpace:
        raise
    except (EdgekitError, ValueError, FileNotFoundError) as error:
        announce(f"the artifact that held the neutral weights cannot give them back; quantising again: {error}")
        shutil.rmtree(rebuilt, ignore_errors=True)
        return False
    except OSError as error:
        raise InvalidInput(
            f"{place}: the neutral weights cannot be rebuilt: {error.strerror or error}; try again, or quantise "
            f"them again after `edgekit store prune {place.name[:12]}`"
        ) from error
    return True


def stored_weights(store: ContentStore, weights_sha256: str, announce: Callable[[str], None]) -> NeutralWeights | None:
    """Return weights by their hash, rebuilt if the store or the package has a reference; None if neither has any."""
    key = key_of(store, weights_sha256) or key_of(BUNDLED_WEIGHTS, weights_sha256)
    if key is None:
        return None

    def make(folder: Path) -> None:
        if not rebuilding(announce)(store, key, folder):
            raise DamagedArtifact(f"{store.root / key}: cannot be rebuilt")

    try:
        return open_held(store, key, make, NeutralWeights.open)
    except DamagedArtifact:
        return None


def _check(place: Path) -> None:
    read_reference(place)


def _write_from(artifact: Artifact, weights: Path, folder: Path) -> None:
    """Write the reference of a user's artifact, which its target reads."""
    _empty(folder)
    manifest, stored = read_manifest(weights), TensorFolder.open(weights)
    try:
        same: Counter[str] = Counter()
        for name, start, values in _given(artifact, manifest, stored):
            mine = stored.array(name, slice(start, start + len(values)))
            same[name] += len(values) if mine.tobytes() == values.tobytes() else 0
        rest = [name for name, entry in stored.entries.items() if not entry.shape or same[name] != entry.shape[0]]
    finally:
        stored.close()
    write_reference(artifact, weights, folder, rest, weights.name, str(artifact.folder.resolve()), {})


def write_reference(
    artifact: Artifact,
    weights: Path,
    folder: Path,
    rest: Sequence[str],
    key: str,
    place: str,
    held: Mapping[str, HeldTensor],
) -> None:
    """Fill `folder` with a reference to the artifact at `place`, and with what it does not hold: the tensors `rest`."""
    kept, manifest, given = folder / REST, read_manifest(weights), artifact.manifest.files
    kept.mkdir()
    with closing(TensorFolder.open(weights)) as stored:
        layout = {name: (stored.entries[name].dtype, stored.entries[name].shape) for name in rest}
        with TensorWriter(kept / _TENSORS, layout) as writer:
            for name in layout:
                writer.write(name, stored.array(name))
            writer.seal()
    for name, file in manifest.files.items():
        if not name.endswith(".safetensors") and (name not in given or given[name].sha256 != file.sha256):
            copy_file(weights / name, kept / name)
    copy_file(weights / MANIFEST, kept / MANIFEST)
    reference = WeightsReference(
        key=key,
        weights_sha256=manifest.weights_sha256,
        artifact=place,
        artifact_sha256=artifact.sha256,
        held=dict(held),
    )
    write_file(folder / REFERENCE, to_sealed_json(reference))


def _fill(folder: Path, rest: Path, artifact: Artifact, held: Mapping[str, HeldTensor]) -> None:
    """Fill `folder` with the weights of a reference, the manifest last. Raises `DamagedArtifact`."""
    manifest = read_manifest(rest)
    if manifest.weights_sha256 != artifact.manifest.weights_sha256:
        raise DamagedArtifact(f"{rest}: describes other weights than {artifact.folder} was packed from")
    kept, parts = TensorFolder.open(rest / _TENSORS), parts_of(manifest.model)
    with ExitStack() as stack:
        stack.callback(kept.close)
        writers: dict[str, TensorWriter] = {}
        for part in parts:
            layout = layout_of(part, manifest.model, manifest.recipe)
            writer = stack.enter_context(TensorWriter(folder / shard_name(part.number, len(parts)), layout))
            writers |= dict.fromkeys(layout, writer)
        for name, entry in kept.entries.items():
            wanted = writers[name].entries[name] if name in writers else None
            if wanted is None or (entry.dtype, entry.shape) != (wanted.dtype, wanted.shape):
                raise DamagedArtifact(f"{rest}: {quote_short(name)} is no tensor of these weights")
            writers[name].write(name, kept.array(name))
        missing = writers.keys() - kept.entries.keys()
        for name in [name for name in held if name in missing]:
            writers[name].write(name, _held(artifact, held[name], writers[name].entries[name]))
            missing.discard(name)
        for name, start, values in _given(artifact, manifest, kept) if missing else ():
            if name not in kept.entries and name not in held:
                writers[name].write(name, values, start)
                missing.discard(name)
        if missing:
            raise DamagedArtifact(f"{artifact.folder}: no longer gives {min(missing)}")
        for writer in {id(each): each for each in writers.values()}.values():
            writer.seal()
    own = {path.name for path in rest.iterdir()}
    for name, file in manifest.files.items():
        if not name.endswith(".safetensors"):
            if name not in own and name not in artifact.manifest.files:
                raise DamagedArtifact(f"{rest}: lacks {name}")
            copy_file((rest if name in own else artifact.folder) / name, folder / name)
        if file_sha256(folder / name) != file.sha256:
            raise DamagedArtifact(f"{artifact.folder}: gives other weights than it was packed from ({name})")
    copy_file(rest / MANIFEST, folder / MANIFEST)


def _held(artifact: Artifact, held: HeldTensor, entry: TensorEntry) -> NDArray[Any]:
    """Return the bytes of a tensor that a file of the artifact holds. Raises `DamagedArtifact`."""
    if held.file not in artifact.manifest.files or (held.is_widened and entry.dtype != "BF16"):
        raise DamagedArtifact(f"{artifact.folder}: {quote_short(held.file)} cannot hold a tensor {entry.dtype}")
    size = entry.bytes * 2 if held.is_widened else entry.bytes
    if held.offset + size > artifact.manifest.files[held.file].bytes:
        raise DamagedArtifact(f"{artifact.folder}: {held.file} is too short for a tensor at {held.offset:,}")
    data = np.memmap(artifact.folder / held.file, np.uint8, "r", held.offset, (size,))
    return float32_to_bf16(data.view("<f4")) if held.is_widened else data


def _given(artifact: Artifact, manifest: NeutralManifest, stored: TensorFolder) -> Iterator[_Rows]:
    """Yield floats and packed integers as the artifact gives them, with the scales in `stored`."""
    model = manifest.model
    tensors = {tensor.name: tensor for tensor in model.tensors()}
    for name, values in artifact.target().weights(artifact.plan, artifact.folder):
        tensor = tensors.get(name)
        if tensor is None or values.shape != tensor.shape:
            continue
        kind = manifest.recipe.format_of(tensor)
        step = max(1, _BLOCK_VALUES * len(values) // values.size)
        for start in range(0, len(values), step):
            rows = values[start : start + step]
            if kind.is_float:
                yield _Rows(on_disk(model, name), start, as_stored(rows, kind, name))
                continue
            scale = on_disk(model, f"{tensor.module}.weight_scale")
            if scale not in stored.entries:
                raise DamagedArtifact(f"the scales {quote_short(scale)} are missing")
            scales = stored.floats(scale, slice(start, start + step))
            integers = _integers(rows, scales, bits_of(kind))
            yield _Rows(on_disk(model, f"{tensor.module}.weight_packed"), start, pack(integers, bits_of(kind)))


def _integers(values: NDArray[np.float32], scales: NDArray[np.float32], bits: int) -> NDArray[np.int8]:
    """Return the integers of integer × scale."""
    half = 1 << (bits - 1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotients = np.rint(values.reshape(*scales.shape, -1) / scales[..., None])
    np.clip(np.nan_to_num(quotients, copy=False), -half, half - 1, out=quotients)
    integers: NDArray[np.int8] = quotients.reshape(values.shape).astype(np.int8)
    return integers


def _empty(folder: Path, but: Path | None = None) -> None:
    for path in folder.iterdir():
        if path != but:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
