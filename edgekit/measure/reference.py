"""Reference logits, computed once and kept: what the float model (or another artifact) says after each token.

They are float32 without any rounding, so that a model compared with itself differs by exactly nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgekit.errors import InvalidInput, TargetMissing
from edgekit.files import disk_full, home
from edgekit.interfaces import Chunk, Engine, Progress
from edgekit.source import ModelSource
from edgekit.store import Store
from edgekit.weights.parts import reader
from edgekit.weights.safetensors import TensorFolder
from edgekit.weights.sources import source_hashes

if TYPE_CHECKING:
    from edgekit.cache import Storage

Logits: TypeAlias = NDArray[np.float32]

_BATCH_TOKENS = 2048
_LOGITS = "logits.npy"


class Windows(NamedTuple):
    """A text as windows of tokens, each read on its own."""

    tokens: tuple[tuple[int, ...], ...]
    sha256: str

    @property
    def scored(self) -> int:
        """Tokens that have one before them in their window."""
        return sum(len(window) - 1 for window in self.tokens)


def windows_of(tokens: Sequence[int], length: int, limit: int, begin: Sequence[int] = ()) -> Windows:
    """Windows of `length` tokens, `begin` (a bos) included, at most `limit` tokens in all."""
    body = length - len(begin)
    if body < 2:
        raise InvalidInput(f"windows of {length} tokens leave nothing to score; give --context 16 or more")
    found = []
    for start in range(0, min(len(tokens), limit), body):
        piece = tuple(begin) + tuple(tokens[start : min(start + body, limit)])
        if len(piece) > len(begin) + 1:
            found.append(piece)
    if not found:
        raise InvalidInput("the text has fewer than two tokens; give a longer one with --text")
    return Windows(tuple(found), hashlib.sha256(json.dumps(found).encode()).hexdigest())


def engine_logits(engine: Engine, storage: Storage, windows: Windows) -> Iterator[Logits]:
    """What an engine says after every token of each window."""
    for window in windows.tokens:
        state = engine.start(storage)
        try:
            rows = []
            step = engine.abilities.max_chunk_tokens
            for start in range(0, len(window), step):
                chunk = window[start : start + step]
                rows.append(np.array(engine.forward([Chunk(state, chunk, len(chunk))])[0], dtype=np.float32))
            yield np.concatenate(rows)
        finally:
            state.close()


def source_logits(source: ModelSource, windows: Windows, context: int, progress: Progress) -> Iterator[Logits]:
    """What the float model says, one layer of it in memory at a time."""
    try:
        import torch
    except ImportError as error:
        raise TargetMissing("the reference needs torch; pip install 'edgekit[quantize]'") from error
    from edgekit.weights.decoder import logits

    with TensorFolder.open(source.folder) as tensors:
        read = reader(tensors, source.spec)
        done = 0
        for batch in _batches(windows):
            progress(done, len(windows.tokens), "reference")
            found = logits(source.spec, read, torch.tensor(batch), context_tokens=context)
            done += len(batch)
            for rows in found:
                yield np.array(rows.numpy(), dtype=np.float32)
    progress(1, 1, "reference")


def stored(key: str, windows: Windows, vocabulary: int, make: Callable[[], Iterator[Logits]]) -> list[Logits]:
    """The logits of every window, mapped from a file that is made once."""
    full = hashlib.sha256(f"{key} {windows.sha256}".encode()).hexdigest()
    total = sum(len(window) for window in windows.tokens)

    def write(folder: Path) -> None:
        with disk_full(folder / _LOGITS, total * vocabulary * 4):
            file = np.lib.format.open_memmap(folder / _LOGITS, "w+", np.float32, (total, vocabulary))
            place = 0
            for rows in make():
                file[place : place + len(rows)] = rows
                place += len(rows)
            file.flush()
        assert place == total, (place, total)

    def check(folder: Path) -> None:
        if _open(folder).shape != (total, vocabulary):
            raise InvalidInput(f"{folder}: not the logits of this text")

    values = _open(Store(home() / "reference").get(full, write, check))
    starts = np.cumsum([0, *(len(window) for window in windows.tokens)])
    return [values[start:stop] for start, stop in pairwise(starts)]


def source_key(source: ModelSource, context: int) -> str:
    """The same for the same weights."""
    with TensorFolder.open(source.folder) as tensors:
        return f"{sorted(source_hashes(source.folder, tensors).items())} {context}"


def _open(folder: Path) -> Logits:
    try:
        values: Logits = np.load(folder / _LOGITS, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{folder}: holds no logits") from error
    return values


def _batches(windows: Windows) -> Iterator[list[tuple[int, ...]]]:
    """Windows of one length together, in order."""
    batch: list[tuple[int, ...]] = []
    for window in windows.tokens:
        if batch and (len(window) != len(batch[0]) or (len(batch) + 1) * len(window) > _BATCH_TOKENS):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch
