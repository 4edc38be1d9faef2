"""Prompt lookup: find the last few tokens earlier in the text, and propose the tokens that followed them there.

The index is a hash table over runs of tokens, so that a look-up costs the same at any length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from edgekit.contracts.drafter import LOOKUP_TOKENS

if TYPE_CHECKING:
    from edgekit.runtime.speculation.draft_method import DraftRequest

LONGEST, SHORTEST = 4, 2  # tokens of a match; the longest is tried first
KEPT_TOKENS = 1 << 14  # newest tokens of a text in the index; it may grow to twice as many
INDEX_BYTES = 300  # per indexed token; measured: 230 to 295
_BITS = 21  # bits of a token in a key; vocabularies have fewer than two million tokens


class TextIndex:
    """The last position of every run of two to four tokens in a growing text."""

    def __init__(self, kept_tokens: int = KEPT_TOKENS) -> None:
        self._text: list[int] = []  # the newest tokens, from number `_start` of the whole text on
        self._start = 0
        self._kept = kept_tokens
        # For each length of a run: its key → the number of the token after it.
        self._places: dict[int, dict[int, int]] = {size: {} for size in range(LONGEST, SHORTEST - 1, -1)}

    def __len__(self) -> int:
        """The number of appended tokens, including dropped ones."""
        return self._start + len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        text, start = self._text, self._start
        fours, threes, pairs = self._places.values()
        for token in tokens:
            count = len(text)
            # A run is added with the token after it, so the newest run does not find itself.
            if count >= LONGEST:
                pair = text[-2] << _BITS | text[-1]
                three = text[-3] << (2 * _BITS) | pair
                pairs[pair] = threes[three] = fours[text[-4] << (3 * _BITS) | three] = start + count
            else:
                for size in range(SHORTEST, count + 1):
                    self._places[size][_key(text[-size:])] = start + count
            text.append(token)
        if len(text) > 2 * self._kept:
            self._drop_older_half()

    def find(self, limit: int) -> tuple[list[int], int]:
        """Return up to `limit` tokens after the last occurrence of the newest run, and the length of the match."""
        tail = self._text[-LONGEST:]
        for size, places in self._places.items():
            if len(tail) < size:
                continue
            place = places.get(_key(tail[-size:]))
            if place is not None and place >= self._start:
                return self._following(place - self._start, limit), size
        return [], 0

    def _following(self, index: int, limit: int) -> list[int]:
        """Return `limit` tokens from `index` on. At the end of the text, start again at `index`, as in a loop."""
        following = self._text[index : index + limit]
        while len(following) < limit:
            following += self._text[index : index + limit - len(following)]
        return following

    def _drop_older_half(self) -> None:
        """Drop the older half of the tokens, and the runs whose last position is in it."""
        drop = len(self._text) - self._kept
        del self._text[:drop]
        self._start += drop
        for size, places in self._places.items():
            self._places[size] = {key: place for key, place in places.items() if place >= self._start}


def kept_tokens(capacity_tokens: int) -> int:
    """Return the number of tokens to index for a cache of `capacity_tokens`: no more than the model sees."""
    return min(KEPT_TOKENS, -(-capacity_tokens // 2))


def _key(run: Sequence[int]) -> int:
    """Encode a run as one number."""
    key = 0
    for token in run:
        key = key << _BITS | token
    return key


class NgramDrafter:
    """Looks in the request's own text."""

    def __init__(self, request: DraftRequest, kept_tokens: int) -> None:
        self._request, self._index = request, TextIndex(kept_tokens)
        self.match_length = 0  # match length of the last proposal

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        self._index.extend(history[len(self._index) :])
        proposal, self.match_length = self._index.find(limit)
        return proposal if self._request.grammar is None or not proposal else self._allowed(proposal)

    def _allowed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Cut the tokens where the grammar of the answer forbids one."""
        assert self._request.grammar is not None
        grammar = self._request.grammar.fork()
        for index, token in enumerate(tokens):
            allowed = grammar.allowed()
            if grammar.is_finished() or (allowed is not None and not allowed[token]):
                return tokens[:index]
            grammar.advance(token)
        return tokens

    def catch_up_s(self, history: Sequence[int]) -> float:
        """Indexing takes about a microsecond a token."""
        return 1e-6 * (len(history) - len(self._index))

    def observe(self, accepted: Sequence[int]) -> None:
        """Nothing to learn: `propose` gets the text."""

    def close(self) -> None:
        """Nothing to release."""


class Ngrams(NamedTuple):
    """Prompt lookup for every request of a runtime."""

    kept_tokens: int = KEPT_TOKENS
    name: str = "ngram"
    tokens: int = LOOKUP_TOKENS
    bytes: int = 0  # but for the indexes of the texts
    reads_hidden: bool = False

    def start(self, request: DraftRequest) -> NgramDrafter:
        return NgramDrafter(request, self.kept_tokens)

    def draft_s(self, tokens: int) -> float:
        """Seconds of a look-up after a forward, which has evicted the index from the processor's caches."""
        return 15e-6

    def close(self) -> None:
        """Nothing to release."""
