"""The protocol of a grammar that an answer must follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Grammar(Protocol):
    """Says which tokens may come next in one answer. `allowed` returns a mask, or None if all may."""

    def allowed(self) -> NDArray[np.bool_] | None: ...
    def advance(self, token: int) -> None: ...
    def fork(self) -> Grammar: ...
    def is_finished(self) -> bool: ...
    def close(self) -> None: ...
