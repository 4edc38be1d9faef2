"""The cached values of a run of tokens of a `FakeEngine`."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekit.common.files import write_file
from edgekit.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.enginekit.recurrent import Values

SEGMENT_MAGIC = b"edgekit-fake-segment"


class FakeSegment:
    """The cached values of a run of tokens. A recurrent engine's segment also has the tokens and checkpoints.

    `checkpoints` count from the segment's first token.
    """

    def __init__(
        self,
        values: NDArray[Any],
        model: str,
        ids: Sequence[int] = (),
        checkpoints: Mapping[int, Values] | None = None,
        evicted: int = 0,
    ) -> None:
        self.values, self.model, self.ids, self.evicted = values, model, list(ids), evicted
        self.checkpoints = dict(checkpoints or {})
        self.tokens: int = values.shape[1]

    @property
    def bytes(self) -> int:
        kept = sum(array.nbytes for values in self.checkpoints.values() for array in values)
        return self.values.nbytes + 4 * len(self.ids) + kept

    def _refuse_evicted(self) -> None:
        if self.evicted:
            raise Unsupported("a segment saved after evictions can only be restored, as a whole")

    def head(self, count: int) -> FakeSegment:
        self._refuse_evicted()
        if not 0 <= count <= self.tokens:
            raise InvalidInput(f"a segment of {self.tokens} tokens has no first {count}")
        kept = {at: values for at, values in self.checkpoints.items() if at <= count}
        return FakeSegment(self.values[:, :count], self.model, self.ids[:count], kept)

    def split(self, count: int) -> tuple[FakeSegment, FakeSegment]:
        if not 0 <= count <= self.tokens:
            raise InvalidInput(f"a segment of {self.tokens} tokens cannot be split after {count}")
        head, tail = self.head(count), self.values[:, count:].copy()
        kept = {at - count: values for at, values in self.checkpoints.items() if at > count}
        head.values = head.values.copy()
        return head, FakeSegment(tail, self.model, self.ids[count:], kept)

    def write(self, path: Path) -> None:
        self._refuse_evicted()
        header = {"model": self.model, "shape": self.values.shape, "dtype": str(self.values.dtype)}
        kept = {at: values[0].tolist() for at, values in self.checkpoints.items()}
        text = json.dumps({**header, "ids": self.ids, "checkpoints": kept}).encode()
        write_file(path, SEGMENT_MAGIC + struct.pack("<I", len(text)) + text + self.values.tobytes())
