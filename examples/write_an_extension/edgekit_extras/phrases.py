"""`--draft phrases:FILE`: propose the rest of a phrase as soon as its first tokens were written.

An app that answers with fixed phrases knows them beforehand. FILE has one phrase a line, which follows a
space. The model verifies every proposal, so that the text is the same as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgekit.drafters import DraftSource
from edgekit.errors import InvalidInput

if TYPE_CHECKING:
    from edgekit.drafters import DraftMethod, DraftRequest, DraftTarget, Proposer

_BEGINNING = 2  # tokens of a phrase after which its rest is proposed
_MOST_BYTES = 1 << 20


class PhraseSource(DraftSource):
    """Opens a file of phrases."""

    def check(self, argument: str) -> None:
        path = Path(argument)
        if not argument or not path.is_file():
            raise InvalidInput(f"draft phrases:{argument}: is no file; give phrases:FILE with one phrase a line")
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidInput(f"draft phrases:{argument}: is larger than 1 MiB; give fewer phrases")

    def open(self, argument: str, target: DraftTarget) -> DraftMethod:
        encode = target.codec.encode
        lines = Path(argument).read_text().splitlines()
        return Phrases([encode(f" {line.strip()}", add_special_tokens=False) for line in lines if line.strip()])


class Phrases:
    """The tokens of all phrases, for every request of a runtime."""

    name, reads_hidden = "phrases", False

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self.phrases = [tuple(phrase) for phrase in phrases if len(phrase) > _BEGINNING]
        self.tokens = max(map(len, self.phrases), default=1)
        self.bytes = 64 * sum(map(len, self.phrases))

    def start(self, request: DraftRequest) -> Proposer:
        return PhraseDrafter(self.phrases)

    def draft_s(self, tokens: int) -> float:
        """Seconds of a proposal: a look-up takes next to nothing."""
        return 1e-5

    def close(self) -> None:
        """Nothing to release."""


class PhraseDrafter:
    """Proposes for one request."""

    match_length = 0  # of the last proposal; acceptance is learned for each length

    def __init__(self, phrases: Sequence[tuple[int, ...]]) -> None:
        self._phrases = phrases

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        """Return the rest of the phrase whose beginning the text ends with; the longest beginning wins."""
        longest = max(map(len, self._phrases), default=0)
        end = tuple(history[-longest:]) if longest else ()
        for length in range(len(end), _BEGINNING - 1, -1):
            for phrase in self._phrases:
                if len(phrase) > length and phrase[:length] == end[-length:]:
                    self.match_length = length
                    return phrase[length : length + limit]
        self.match_length = 0
        return ()

    def observe(self, accepted: Sequence[int]) -> None:
        """Nothing to learn."""

    def catch_up_s(self, history: Sequence[int]) -> float:
        return 0.0

    def close(self) -> None:
        """Nothing to release."""
