"""Reference logits of the float model, computed once and stored.

They are stored as float32 without rounding, so that a model's distance from itself is exactly 0. The least recently
used ones are dropped when they take too much space.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit import ModelSource, open_tensors, reference_logits
from edgekit.common.content_store import ContentStore
from edgekit.common.files import disk_full, free_bytes, home
from edgekit.common.progress import Progress
from edgekit.contracts.engine import Engine
from edgekit.contracts.feeding import feed
from edgekit.errors import InvalidInput, OutOfSpace, TargetMissing

if TYPE_CHECKING:
    from edgekit.contracts.kv_policy import KVCacheConfig

Logits: TypeAlias = NDArray[np.float32]

KEPT_BYTES = 8 << 30
_BATCH_TOKENS = 2048
_LOGITS = "logits.npy"


class Windows(NamedTuple):
    """A text as windows of tokens, each processed on its own."""

    tokens: tuple[tuple[int, ...], ...]
    sha256: str


def windows_of(tokens: Sequence[int], length: int, limit: int, begin: Sequence[int] = ()) -> Windows:
    """Cut tokens into windows of `length`, each beginning with `begin` (a bos); at most `limit` tokens in all."""
    body = length - len(begin)
    if body < 2:
        raise InvalidInput(f"windows of {length} tokens leave nothing to score; give --context 16 or more")
    windows = []
    for start in range(0, min(len(tokens), limit), body):
        piece = tuple(begin) + tuple(tokens[start : min(start + body, limit)])
        if len(piece) > len(begin) + 1:
            windows.append(piece)
    if not windows:
        raise InvalidInput("the text has fewer than two tokens; give a longer one with --text")
    return Windows(tuple(windows), hashlib.sha256(json.dumps(windows).encode()).hexdigest())


def engine_logits(engine: Engine, storage: KVCacheConfig, windows: Windows) -> Iterator[Logits]:
    """Yield an engine's logits after every token of each window."""
    for window in windows.tokens:
        state = engine.start(storage)
        try:
            yield feed(engine, state, window, len(window))
        finally:
            state.close()


def source_logits(source: ModelSource, windows: Windows, context: int, progress: Progress) -> Iterator[Logits]:
    """Yield the float model's logits, with one layer in memory at a time."""
    try:
        import torch
    except ImportError as error:
        raise TargetMissing("the reference needs torch; pip install 'edgekit[quantize]'") from error

    with open_tensors(source.weights) as tensors:
        done = 0

        def tensor(name: str) -> torch.Tensor:
            return torch.from_numpy(tensors.floats(name))

        for batch in _batches(windows):
            progress(done, len(windows.tokens), "reference")
            found = reference_logits(source.spec, tensor, torch.tensor(batch), context_tokens=context)
            done += len(batch)
            for rows in found:
                yield np.array(rows.numpy(), dtype=np.float32)
    progress(1, 1, "reference")


def stored(key: str, windows: Windows, vocabulary: int, make: Callable[[], Iterator[Logits]]) -> list[Logits]:
    """Return the logits of every window, mapped from a file that is made once.

    All stored logits take at most `KEPT_BYTES`; if these exceed that, only these are kept.
    """
    full = hashlib.sha256(f"{key} {windows.sha256}".encode()).hexdigest()
    shape = (sum(len(window) for window in windows.tokens), vocabulary)
    needed = shape[0] * shape[1] * 4

    def write(folder: Path) -> None:
        path = folder / _LOGITS
        free = free_bytes(folder) + (path.stat().st_size if path.exists() else 0)
        if free < needed:
            raise OutOfSpace(str(path), needed, free)
        # Written, not mapped: a full disk then raises an error, while a fault of a mapped page kills the process.
        with disk_full(path, needed), path.open("wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": np.dtype(np.float32).str, "fortran_order": False, "shape": shape}
            )
            index = 0
            for rows in make():
                file.write(np.ascontiguousarray(rows, dtype=np.float32).data)
                index += len(rows)
            file.flush()
            os.fsync(file.fileno())
        assert index == shape[0], (index, shape)

    def check(folder: Path) -> None:
        if _open(folder).shape != shape:
            raise InvalidInput(f"{folder}: not the logits of this text")

    store = ContentStore(home() / "reference")
    store.keep_within(max(0, KEPT_BYTES - needed), spare=full)
    try:
        values = _open(store.get(full, write, check))
    except InvalidInput:  # another process dropped it at this moment
        values = _open(store.get(full, write, check))
    starts = np.cumsum([0, *(len(window) for window in windows.tokens)])
    return [values[start:stop] for start, stop in pairwise(starts)]


def source_key(source: ModelSource, context: int) -> str:
    """Return a key of the weights and the context."""
    return f"{sorted(source.hashes().items())} {context}"


def _open(folder: Path) -> Logits:
    try:
        values: Logits = np.load(folder / _LOGITS, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{folder}: holds no logits") from error
    return values


def _batches(windows: Windows) -> Iterator[list[tuple[int, ...]]]:
    """Yield batches of windows of one length, in order."""
    batch: list[tuple[int, ...]] = []
    for window in windows.tokens:
        if batch and (len(window) != len(batch[0]) or (len(batch) + 1) * len(window) > _BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch
