"""Reads drafting heads, as safetensors: EAGLE-3 heads, MTP parts, Gemma 4's assistants, and all of them sealed.

`eagle3`, `mtp` and `assistant` read their configs. Every size is checked against the target model before a weight is
read, and an error names any tensor without a use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from edgekit.common.parsing import parse_json, read_bytes, sentence_of
from edgekit.errors import InvalidInput, Unsupported, quote_short
from edgekit.formats.safetensors import TensorFolder
from edgekit.model.assistant import is_assistant, read_assistant
from edgekit.model.eagle3 import read_eagle3
from edgekit.model.head_spec import HEAD, HeadConfig, HeadSpec
from edgekit.model.mtp import is_mtp, read_mtp
from edgekit.model.spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.formats.safetensors import Rows

CONFIG = "config.json"
EMBEDDING = "embed_tokens.weight"
_MAX_CONFIG_BYTES = 4 << 20
_FLOATS = ("F32", "F16", "BF16")
ORDER = "token_ordering"  # an assistant's tokens, cluster by cluster
_CHECKED_ROWS = 4096  # at once


class HeadWeights(NamedTuple):
    """The files of a head, checked: its sizes and its stored weights. Decoders of `edgekit.runtime` run sealed ones."""

    spec: HeadSpec
    layer_config: dict[str, Any]  # the sizes of its layers, in transformers' fields
    targets: NDArray[np.int64] | None  # the target's token for each draft token; None: they are chosen at sealing
    tensors: TensorFolder
    stored: Mapping[str, str]  # names in `spec.tensors()` → names in the files

    def floats(self, name: str, rows: Rows | None = None) -> NDArray[np.float32]:
        """Return a weight, or some of its rows, in float32."""
        return self.tensors.floats(self.stored[name], rows)

    def rows(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the embeddings of the target's tokens, if the head has an embedding."""
        return self.floats(EMBEDDING, tokens)

    def close(self) -> None:
        """Unmap the files that no array refers to."""
        self.tensors.close()


def read_head(folder: Path, target: ModelSpec) -> HeadWeights:
    """Read the head in `folder` for `target`.

    Raises `InvalidInput` or `Unsupported` for a head of another model, a damaged one, or one with unsupported parts.
    """
    path = folder / CONFIG
    data = read_bytes(path, _MAX_CONFIG_BYTES)
    config = parse_json(data, str(path))
    reader = read_mtp if is_mtp(config) else read_assistant if is_assistant(config) else read_eagle3
    read = reader(config, path, target)
    tensors = TensorFolder.open(folder)
    try:
        digest = hashlib.sha256(data + repr(sorted(tensors.entries.items())).encode())
        stored: dict[str, str] = {}
        for name in sorted(tensors.entries):
            if name.startswith(read.prefix):
                # A head that is tied to an embedding may be stored twice: `lm_head` comes first.
                stored.setdefault(_canonical(name.removeprefix(read.prefix), read.renamed), name)
        if not stored:
            raise InvalidInput(f"{folder}: holds no {read.prefix}* tensors; give the folder of a checkpoint with them")
        try:
            spec = HeadSpec(
                **read.sizes,
                own_embedding=EMBEDDING in stored and read.sizes.get("kind", "eagle3") == "eagle3",
                sha256=digest.hexdigest(),
            )
        except ValidationError as error:
            raise InvalidInput(f"{path}: {sentence_of(error)}; correct the file") from error
        _check_tensors(folder, read, spec, tensors, stored)
        targets = _targets(folder, read, spec, tensors, stored)
        return HeadWeights(spec, read.layer_config, targets, tensors, stored)
    except BaseException:
        tensors.close()
        raise


def _canonical(name: str, renamed: Mapping[str, str]) -> str:
    """Return the name of a tensor in `HeadSpec.tensors`."""
    start = next((start for start in renamed if name.startswith(start)), "")
    return renamed.get(start, "") + name.removeprefix(start)


def _check_tensors(
    folder: Path, read: HeadConfig, spec: HeadSpec, tensors: TensorFolder, stored: Mapping[str, str]
) -> None:
    expected = {name: shape for name, shape in spec.tensors() if name not in read.from_target}
    if read.all_rows:
        expected[HEAD] = (spec.layer.vocab_size, spec.layer.hidden_size)
    if spec.own_embedding:
        expected[EMBEDDING] = (spec.layer.vocab_size, spec.layer.hidden_size)
    elif spec.kind == "eagle3" and spec.layer.hidden_size != spec.target_hidden_size:
        raise InvalidInput(f"{folder}: the head is narrower than its target and has no {EMBEDDING}; is it complete?")
    unknown = sorted(stored.keys() - expected.keys() - set(read.others))
    if unknown:
        raise Unsupported(f"{folder}: tensor {quote_short(stored[unknown[0]])} is not part of a supported head")
    for name, shape in expected.items():
        entry = tensors.entry(stored.get(name, read.prefix + name))
        if entry.shape != shape:
            raise InvalidInput(
                f"{folder}: tensor {quote_short(stored[name])} has the shape {list(entry.shape)}, not {list(shape)}"
            )
        if entry.dtype not in _FLOATS:
            raise Unsupported(
                f"{folder}: tensor {quote_short(stored[name])} is stored as {entry.dtype}; floats are read"
            )
        if name != EMBEDDING and not _is_finite(tensors, stored[name], shape[0]):
            raise InvalidInput(
                f"{folder}: tensor {quote_short(stored[name])} holds infinite values or none; copy it again"
            )


def _is_finite(tensors: TensorFolder, name: str, rows: int) -> bool:
    parts = (slice(start, start + _CHECKED_ROWS) for start in range(0, rows, _CHECKED_ROWS))
    return all(bool(np.isfinite(tensors.floats(name, part)).all()) for part in parts)


def _targets(
    folder: Path, read: HeadConfig, spec: HeadSpec, tensors: TensorFolder, stored: Mapping[str, str]
) -> NDArray[np.int64] | None:
    """Return the target's token for each draft token; None if sealing chooses them."""
    if HEAD in read.from_target or (read.all_rows and not spec.clusters):
        return None
    return _ordering(folder, spec, tensors, stored) if read.all_rows else _mapped(folder, spec, tensors, stored)


def _ordering(folder: Path, spec: HeadSpec, tensors: TensorFolder, stored: Mapping[str, str]) -> NDArray[np.int64]:
    """Return the tokens of an assistant's clusters, one cluster after the other."""
    name, count = stored.get(ORDER, ORDER), spec.layer.vocab_size
    entry = tensors.entry(name)
    if entry.dtype not in ("I64", "I32") or entry.shape != (count,):
        raise InvalidInput(f"{folder}: {name} is {entry.dtype} {list(entry.shape)}, expected I64 [{count}]")
    tokens: NDArray[np.int64] = tensors.array(name).astype(np.int64)
    if not np.array_equal(np.sort(tokens), np.arange(count)):
        raise InvalidInput(f"{folder}: {name} does not name each of {count:,} tokens once; copy the head again")
    return tokens


def _mapped(folder: Path, spec: HeadSpec, tensors: TensorFolder, stored: Mapping[str, str]) -> NDArray[np.int64]:
    """Return the tokens of a map: `d2t` holds differences, and `t2d` marks the same tokens."""
    vocabulary, count = spec.layer.vocab_size, spec.draft_vocab_size
    if "d2t" not in stored:
        if count != vocabulary:
            raise InvalidInput(f"{folder}: {count:,} draft tokens of {vocabulary:,} and no d2t; is the head complete?")
        return np.arange(count, dtype=np.int64)
    entry = tensors.entry("d2t")
    if entry.dtype != "I64" or entry.shape != (count,):
        raise InvalidInput(f"{folder}: d2t is {entry.dtype} {list(entry.shape)}, expected I64 [{count}]")
    offsets = tensors.array("d2t")
    if np.abs(offsets.clip(-vocabulary - 1, vocabulary + 1)).max() > vocabulary:
        raise InvalidInput(f"{folder}: d2t leads outside the vocabulary of {vocabulary:,}")
    targets: NDArray[np.int64] = np.arange(count, dtype=np.int64) + offsets
    if targets.min() < 0 or targets.max() >= vocabulary or len(np.unique(targets)) != count:
        raise InvalidInput(f"{folder}: d2t leads outside the vocabulary of {vocabulary:,}, or to one token twice")
    if "t2d" in stored:
        marks = tensors.entry("t2d")
        if marks.dtype != "BOOL" or marks.shape != (vocabulary,):
            raise InvalidInput(f"{folder}: t2d is {marks.dtype} {list(marks.shape)}, expected BOOL [{vocabulary}]")
        marked = np.flatnonzero(tensors.array("t2d").view(np.uint8))
        if not np.array_equal(marked, np.sort(targets)):
            raise InvalidInput(f"{folder}: d2t and t2d name different tokens; copy the head again")
    return targets
