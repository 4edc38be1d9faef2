"""Opens a GGUF file as a model: config and tokenizer are converted to Hugging Face's files, weights stay in the file.

The converted files are written once, to a folder named after the header's hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit.common.content_store import ContentStore, Hold
from edgekit.common.files import home, write_file
from edgekit.errors import InvalidInput, quote_short
from edgekit.formats.gguf import GgufFile
from edgekit.formats.gguf_tensors import GgufTensors, TensorView, open_shards, stem_of
from edgekit.model.gguf_config import TOP, HuggingFaceModel, huggingface_model, is_rope_tensor
from edgekit.model.gguf_tokenizer import token_ids, tokenizer_files

CONVERSION = 1  # to be raised when the same header gives other files
_MAX_ROPE_FACTORS = 1 << 13
_TABLES = _HEAD, _TABLE = "output.weight", "token_embd.weight"
_COMPARED_ROWS = 256
# The most that two roundings of a row are apart in the median, by its length: 2 bits reach 0.3, other tables 1 or more.
_ROUNDING = 0.35


class GgufModel(NamedTuple):
    """An opened GGUF file: its name, and the folder of its converted files, which is held. Close its tensors."""

    name: str
    folder: Path
    hold: Hold
    notes: tuple[str, ...]
    tensors: GgufTensors


def open_gguf(path: Path) -> GgufModel:
    """Open the model of a GGUF file; given the first of several parts, of all of them."""
    with ExitStack() as on_error:
        shards = [on_error.enter_context(shard) for shard in open_shards(path)]
        second = _second_table(shards)
        described = _described(shards, second)
        notes = () if second is None else (f"{second} is left out: it is the other table of tokens up to rounding",)
        tensors = GgufTensors(shards, described.views)
        found = GgufModel(stem_of(path), *_companions(shards, described, second), notes, tensors)
        on_error.pop_all()
        return found


def file_identity(path: Path) -> str:
    """Return a hash that changes if the file, or a further part of it, is replaced or rewritten."""
    parts = [f"{header} {_stamp_of(part)}" for part, header in _headers(path, _stamp_of(path))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@lru_cache(maxsize=16)
def _headers(path: Path, _stamp: str) -> tuple[tuple[Path, str], ...]:
    """Return each part with the hash of its header, which is read once while the first part stays as it is."""
    with ExitStack() as stack:
        shards = [stack.enter_context(shard) for shard in open_shards(path)]
        return tuple((shard.path, shard.header_sha256()) for shard in shards)


def _stamp_of(path: Path) -> str:
    try:
        info = path.stat()
    except OSError:
        return "missing"  # opening it says why
    return f"{info.st_dev} {info.st_ino} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}"


def open_gguf_tensors(path: Path, *, with_second_table: bool = False) -> GgufTensors:
    """Open the weights of a GGUF file under Hugging Face's names. Close the result to unmap the file."""
    with ExitStack() as on_error:
        shards = [on_error.enter_context(shard) for shard in open_shards(path)]
        second = None if with_second_table else _second_table(shards)
        tensors = GgufTensors(shards, _described(shards, second).views)
        on_error.pop_all()
        return tensors


def _second_table(shards: Sequence[GgufFile]) -> str | None:
    """Return the coarser one of two tables of tokens that are equal up to rounding; None if there are no such two.

    A converter may write the table of a tied model once more as its head, in another type.
    """
    stored = {name: tensor for shard in shards for name, tensor in shard.tensors.items() if name in _TABLES}
    shapes = {tensor.shape for tensor in stored.values()}
    if len(stored) < 2 or len(shapes) > 1 or len(shapes.pop()) != 2:
        return None
    one, other = (_some_rows(shards, name) for name in _TABLES)
    scale = np.linalg.norm(one, axis=1) + np.linalg.norm(other, axis=1)
    apart = 2 * np.linalg.norm(one - other, axis=1)[scale > 0] / scale[scale > 0]
    if not apart.size or not np.median(apart) < _ROUNDING:
        return None
    return min(_TABLES, key=lambda name: stored[name].row_bytes)


def _some_rows(shards: Sequence[GgufFile], name: str) -> NDArray[np.float32]:
    shard = next(shard for shard in shards if name in shard.tensors)
    count = shard.tensors[name].shape[0]
    rows = np.linspace(0, count - 1, min(count, _COMPARED_ROWS)).astype(np.intp)
    return shard.rows(name, rows)


def _described(shards: Sequence[GgufFile], second: str | None) -> HuggingFaceModel:
    """Return the model without its `second` table, whose place the finer one takes."""
    shapes = {name: tensor.shape for shard in shards for name, tensor in shard.tensors.items()}
    if second is not None:
        shapes.pop(_HEAD)

    def read(name: str) -> list[float]:
        shard = next(shard for shard in shards if name in shard.tensors)
        shape = shard.tensors[name].shape
        if len(shape) != 1 or shape[0] > _MAX_ROPE_FACTORS:
            raise InvalidInput(
                f"{shard.path}: tensor {quote_short(name)} has shape {list(shape)}; is the file complete?"
            )
        # The shortest decimals of the float32 values, as JSON would hold them.
        return [float(str(value)) for value in shard.rows(name)[0]]

    described = huggingface_model(shards[0].metadata, shapes, read, str(shards[0].path))
    if second == _TABLE:
        described.views[f"{TOP['token_embd']}.weight"] = TensorView(_HEAD)
    return described


def _companions(shards: Sequence[GgufFile], described: HuggingFaceModel, second: str | None) -> tuple[Path, Hold]:
    """Return the folder of a model's converted files, which is written atomically, and its hold."""

    def make(folder: Path) -> None:
        for name, data in _small_files(shards[0].metadata, described, str(shards[0].path)).items():
            write_file(folder / name, data)

    return ContentStore(home() / "gguf").hold(_key(shards, second), make, check=lambda folder: None)


def _key(shards: Sequence[GgufFile], second: str | None) -> str:
    """Return the hash of the inputs of the converted files: the headers, what ties tables, and rope factors."""
    digest = hashlib.sha256(f"conversion {CONVERSION}\n{second or ''}".encode())
    for shard in shards:
        digest.update(shard.header_sha256().encode())
        for name in shard.tensors:
            if is_rope_tensor(name):
                digest.update(shard.rows(name).tobytes())
    return digest.hexdigest()


def _small_files(metadata: Mapping[str, Any], described: HuggingFaceModel, where: str) -> dict[str, bytes]:
    config = described.config | token_ids(metadata, where)
    return {"config.json": (json.dumps(config, indent=1) + "\n").encode()} | tokenizer_files(metadata, where)
