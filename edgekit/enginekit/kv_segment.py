"""Segments: the keys and values of consecutive tokens outside a state, which can be split, written and read.

The engine defines a segment's arrays; the second axis of each is the tokens. For a model with recurrent layers, the
first array holds the token ids, and the segment has checkpoints after some tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edgekit.common.files import write_file
from edgekit.common.parsing import parse_json, read_bytes
from edgekit.errors import DamagedArtifact, InvalidInput, Unsupported, quote_short

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAGIC = b"edgekit segment 1\n"
_MAX_HEADER_BYTES = 4096


class SegmentPart(NamedTuple):
    """One array of a segment: [rows, tokens, width]."""

    rows: int
    width: int
    dtype: np.dtype[Any]

    @property
    def token_bytes(self) -> int:
        return self.rows * self.width * self.dtype.itemsize


class KeyValues:
    """The keys and values of `model` (its key) for the tokens from position `start` on, in KV format `form`.

    `checkpoints` maps numbers of tokens, counted from the beginning of the text, to the recurrent part after them.
    `evicted` tokens were dropped before it was saved, so that it cannot be cut or written.
    """

    def __init__(
        self,
        model: str,
        form: str,
        start: int,
        arrays: Sequence[NDArray[Any]],
        checkpoints: Mapping[int, tuple[NDArray[Any], ...]] | None = None,
        evicted: int = 0,
    ) -> None:
        self.model, self.form, self.start, self.arrays, self.evicted = model, form, start, tuple(arrays), evicted
        self.checkpoints = dict(checkpoints or {})

    @property
    def tokens(self) -> int:
        return int(self.arrays[0].shape[1])

    @property
    def bytes(self) -> int:
        kept = (array.nbytes for values in self.checkpoints.values() for array in values)
        return sum(array.nbytes for array in self.arrays) + sum(kept)

    def head(self, count: int) -> KeyValues:
        """Return the first `count` tokens, in the same memory."""
        if not 0 <= count <= self.tokens:
            raise InvalidInput(f"a segment of {self.tokens} tokens has no head of {count}")
        return self._run(0, count, [array[:, :count] for array in self.arrays])

    def split(self, count: int) -> tuple[KeyValues, KeyValues]:
        """Return copies of the first `count` tokens and of the rest, which can be freed separately."""
        if not 0 <= count <= self.tokens:
            raise InvalidInput(f"a segment of {self.tokens} tokens cannot be split after {count}")
        first = [array[:, :count].copy() for array in self.arrays]
        second = [array[:, count:].copy() for array in self.arrays]
        return self._run(0, count, first), self._run(count, self.tokens, second)

    def _refuse_evicted(self) -> None:
        if self.evicted:
            raise Unsupported("a segment saved after evictions can only be restored, as a whole")

    def _run(self, first: int, last: int, arrays: Sequence[NDArray[Any]]) -> KeyValues:
        self._refuse_evicted()
        start, stop = self.start + first, self.start + last
        kept = {at: values for at, values in self.checkpoints.items() if start < at <= stop}
        return KeyValues(self.model, self.form, start, arrays, kept)

    def write(self, path: Path) -> None:
        """Write the segment to a file, atomically."""
        self._refuse_evicted()
        kept = [array for _, values in sorted(self.checkpoints.items()) for array in values]
        body = b"".join(array.tobytes() for array in (*self.arrays, *kept))
        header: dict[str, Any] = {
            "model": self.model,
            "form": self.form,
            "start": self.start,
            "tokens": self.tokens,
            "sha256": hashlib.sha256(body).hexdigest(),
        }
        if self.checkpoints:
            header["checkpoints"] = sorted(self.checkpoints)
        write_file(path, _MAGIC + json.dumps(header).encode() + b"\n" + body)


def read_key_values(
    path: Path,
    models: Sequence[str],
    forms: Mapping[str, Sequence[SegmentPart]],
    capacity: int,
    *,
    recurrent: Sequence[tuple[int, ...]] = (),
    most_checkpoints: int = 0,
) -> KeyValues:
    """Read a file of `KeyValues.write`. Raises `InvalidInput` if it is damaged, of another model or an unknown form.

    `recurrent` has the shapes of the float32 arrays of one checkpoint.
    """
    import numpy as np

    widest = max(sum(part.token_bytes for part in parts) for parts in forms.values())
    checkpoint_bytes = 4 * sum(map(prod, recurrent))
    most_bytes = widest * capacity + checkpoint_bytes * most_checkpoints
    data = read_bytes(path, len(_MAGIC) + _MAX_HEADER_BYTES + most_bytes)
    end = data.find(b"\n", len(_MAGIC), len(_MAGIC) + _MAX_HEADER_BYTES)
    if not data.startswith(_MAGIC) or end < 0:
        raise InvalidInput(f"{path}: is not a saved prefix of this edgekit; remove it")
    header = parse_json(data[len(_MAGIC) : end], str(path))
    start, tokens, form = header.get("start"), header.get("tokens"), header.get("form")
    model = header.get("model")
    if model not in models:
        raise InvalidInput(f"{path}: was saved by another model, artifact or adapter; remove it")
    if not isinstance(form, str) or form not in forms:
        raise InvalidInput(
            f"{path}: holds keys and values as {quote_short(form)}; this engine knows {', '.join(forms)}"
        )
    if type(start) is not int or type(tokens) is not int or start < 0 or not 0 <= tokens <= capacity - start:
        raise InvalidInput(
            f"{path}: says {quote_short(tokens)} tokens from {quote_short(start)}; a state holds {capacity}"
        )
    places = header.get("checkpoints", [])
    in_order = isinstance(places, list) and all(type(at) is int for at in places) and places == sorted(set(places))
    if not in_order or len(places) > most_checkpoints or any(not start < at <= start + tokens for at in places):
        raise InvalidInput(f"{path}: says checkpoints after {quote_short(places)} tokens; a state has other ones")
    body = memoryview(data)[end + 1 :]
    shapes = [(part.rows, tokens, part.width) for part in forms[form]]
    sizes = [prod(shape) * part.dtype.itemsize for shape, part in zip(shapes, forms[form], strict=True)]
    if len(body) != sum(sizes) + checkpoint_bytes * len(places) or hashlib.sha256(body).hexdigest() != header.get(
        "sha256"
    ):
        raise DamagedArtifact(f"{path}: its bytes are not those that were written; remove it")
    arrays, offset = [], 0
    for part, shape, size in zip(forms[form], shapes, sizes, strict=True):
        arrays.append(np.frombuffer(body[offset : offset + size], part.dtype).reshape(shape))
        offset += size
    checkpoints = {}
    for at in places:
        values = []
        for sizes_of_part in recurrent:
            stop = offset + 4 * prod(sizes_of_part)
            values.append(np.frombuffer(body[offset:stop], np.float32).reshape(sizes_of_part))
            offset = stop
        checkpoints[at] = tuple(values)
    return KeyValues(str(model), form, start, arrays, checkpoints)
