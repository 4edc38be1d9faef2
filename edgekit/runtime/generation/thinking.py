"""A budget for thinking: when it is spent, only the end mark is allowed. A format applies after it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Literal

from edgekit.runtime.generation.reasoning import THINKING, THINKING_END

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from edgekit.runtime.generation.structured import Grammar
    from edgekit.runtime.generation.tokenizer import Codec

_WRITTEN_END = f"\n{THINKING_END}\n\n"
_BEGIN, _END = THINKING.encode(), THINKING_END.encode()


def after_thinking(
    grammar: Grammar | None, max_tokens: int | None, codec: Codec, vocabulary: int, is_inside: bool
) -> Grammar | None:
    """Return the grammar of an answer in which `grammar` applies after the thinking, limited to `max_tokens`.

    `is_inside`: the prompt ended with the opening mark. If it did not, and there is no limit, `grammar` applies from
    the start, which leaves no room for thinking.
    """
    if max_tokens is None and not (is_inside and grammar is not None):
        return grammar
    return ThinkingBudget(codec, vocabulary, max_tokens, grammar, is_inside=is_inside)


class ThinkingBudget:
    """A grammar that allows at most `max_tokens` of thinking at the start; then `inner` applies."""

    def __init__(
        self,
        codec: Codec,
        vocabulary: int,
        max_tokens: int | None,
        inner: Grammar | None = None,
        *,
        is_inside: bool = False,
    ) -> None:
        """`is_inside`: the prompt ended with the opening mark. Otherwise the answer itself may open its thinking."""
        self._codec, self._vocabulary, self._max_tokens, self._inner = codec, vocabulary, max_tokens, inner
        self._part: Literal["unknown", "thinking", "answer"] = "thinking" if is_inside else "unknown"
        self._tail = b""  # the newest bytes, in which a mark is searched
        self._num_tokens = 0
        self._ending: Sequence[int] = ()  # the tokens that must come next
        self._end_if_spent()

    def allowed(self) -> NDArray[np.bool_] | None:
        """Return the mask of allowed next tokens; None: all are allowed."""
        if self._part == "answer":
            return self._inner.allowed() if self._inner is not None else None
        if not self._ending:
            return None
        import numpy as np

        mask = np.zeros(self._vocabulary, bool)
        mask[self._ending[0]] = True
        return mask

    def advance(self, token: int) -> None:
        """Count a token that was chosen."""
        if self._part == "answer":
            if self._inner is not None:
                self._inner.advance(token)
            return
        if self._ending:
            self._ending = self._ending[1:]
            self._part = "thinking" if self._ending else "answer"
            return
        self._tail += self._codec.token_bytes(token)
        if self._part == "unknown":
            self._tail = self._tail.lstrip()
            if _BEGIN.startswith(self._tail):
                if self._tail != _BEGIN:
                    return
            elif not self._tail.startswith(_BEGIN):
                self._part = "answer"
                return
            self._part, self._tail = "thinking", self._tail[len(_BEGIN) :]
            self._end_if_spent()
            return
        self._num_tokens += 1
        if _END in self._tail:
            self._part = "answer"
            return
        self._tail = self._tail[1 - len(_END) :]
        self._end_if_spent()

    def fork(self) -> ThinkingBudget:
        """Return an independent copy."""
        other = copy(self)
        other._inner = self._inner.fork() if self._inner is not None else None
        return other

    def is_finished(self) -> bool:
        """Return True if nothing may follow."""
        return self._part == "answer" and self._inner is not None and self._inner.is_finished()

    def close(self) -> None:
        """Close the inner grammar."""
        if self._inner is not None:
            self._inner.close()

    def _end_if_spent(self) -> None:
        if self._part == "thinking" and self._max_tokens is not None and self._num_tokens >= self._max_tokens:
            self._ending = self._codec.encode(_WRITTEN_END, add_special_tokens=False)
