"""Prompt lookup: what followed the last few tokens when they stood in the text before is proposed again.

The index is a table from the newest tokens to where they stood, so that a lookup costs the same at any length. It knows
nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edgekit.runtime.drafting.request import Request

LONGEST, SHORTEST = 4, 2  # tokens that must agree, tried from the longest
KEPT_TOKENS = 1 << 14  # newest tokens of a text that are surely found again; up to twice as many are kept
INDEX_BYTES = 300  # of a token of a text in its tables, as measured: 230 to 295
CORPUS_BYTES = 10  # of a byte of a corpus: 16 to 28 a token, which stands for three bytes or more
_BITS = 21  # of a token within a key; a vocabulary is smaller than two million


class TextIndex:
    """Where each run of two to four tokens stood last in one growing text."""

    def __init__(self, kept_tokens: int = KEPT_TOKENS) -> None:
        self._text: list[int] = []  # the newest tokens; its first one is number `_start` of the whole
        self._start = 0
        self._kept = kept_tokens
        # A run, as one number → the number of the token after it; a table for each length of run.
        self._places: dict[int, dict[int, int]] = {size: {} for size in range(LONGEST, SHORTEST - 1, -1)}

    def __len__(self) -> int:
        """Tokens that were appended so far."""
        return self._start + len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        text, start = self._text, self._start
        fours, threes, pairs = self._places.values()
        for token in tokens:
            count = len(text)
            # The runs that end here become known together with what follows them, and so never find themselves.
            if count >= LONGEST:
                pair = text[-2] << _BITS | text[-1]
                three = text[-3] << (2 * _BITS) | pair
                pairs[pair] = threes[three] = fours[text[-4] << (3 * _BITS) | three] = start + count
            else:
                for size in range(SHORTEST, count + 1):
                    self._places[size][_key(text[-size:])] = start + count
            text.append(token)
        if len(text) > 2 * self._kept:
            self._forget()

    def find(self, limit: int) -> tuple[list[int], int]:
        """At most `limit` tokens that followed the newest run last time, and how many tokens agreed."""
        tail = self._text[-LONGEST:]
        for size, places in self._places.items():
            if len(tail) < size:
                continue
            place = places.get(_key(tail[-size:]))
            if place is not None and place >= self._start:
                return self._following(place - self._start, limit), size
        return [], 0

    def _following(self, place: int, limit: int) -> list[int]:
        """The text from `place`; where it runs into its own end it goes round, as a repetition would."""
        text = self._text
        found = text[place : place + limit]
        while len(found) < limit:
            found += text[place : place + limit - len(found)]
        return found

    def _forget(self) -> None:
        """Drop the older half, and every run that stood only there."""
        drop = len(self._text) - self._kept
        del self._text[:drop]
        self._start += drop
        for size, places in self._places.items():
            self._places[size] = {key: place for key, place in places.items() if place >= self._start}


def kept_tokens(capacity_tokens: int) -> int:
    """How far back a text is looked into where a cache holds that many tokens: as far as the model sees, no further."""
    return min(KEPT_TOKENS, -(-capacity_tokens // 2))


def _key(run: Sequence[int]) -> int:
    """A run as one number."""
    key = 0
    for token in run:
        key = key << _BITS | token
    return key


class Corpus:
    """A text that never changes, indexed by hash: four bytes a place for runs of four and of two tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: NDArray[np.int32] = np.asarray(tokens, np.int32)
        self._mask = (1 << max(4, int(len(self._tokens) * 1.5).bit_length())) - 1
        self._tables = {size: self._table(size) for size in (LONGEST, SHORTEST)}

    @property
    def bytes(self) -> int:
        return self._tokens.nbytes + sum(table.nbytes for table in self._tables.values())

    def find(self, tail: Sequence[int], limit: int) -> tuple[list[int], int]:
        """At most `limit` tokens that followed the end of `tail` somewhere, and how many tokens agreed."""
        for size, table in self._tables.items():
            if len(tail) < size:
                continue
            run = list(tail[-size:])
            place = int(table[_hash(run) & self._mask])
            # The hash only says where to look.
            if place and self._tokens[place - size : place].tolist() == run:
                return self._tokens[place : place + limit].tolist(), size
        return [], 0

    def _table(self, size: int) -> NDArray[np.uint32]:
        """For each hash of a run, the place after its last occurrence."""
        table = np.zeros(self._mask + 1, np.uint32)
        count = len(self._tokens) - size
        if count > 0:
            hashes = np.zeros(count, np.uint64)
            for offset in range(size):
                hashes = _mixed(hashes ^ self._tokens[offset : offset + count].astype(np.uint64))
            table[(hashes & np.uint64(self._mask)).astype(np.int64)] = np.arange(size, size + count, dtype=np.uint32)
        return table


_MULTIPLIER = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def _mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    product: NDArray[np.uint64] = hashes * np.uint64(_MULTIPLIER)
    return product ^ (product >> np.uint64(29))


def _hash(run: Sequence[int]) -> int:
    """As `_mixed`, for one run."""
    found = 0
    for token in run:
        found = (found ^ token) * _MULTIPLIER & _WORD
        found ^= found >> 29
    return found


class NgramDrafter:
    """Looks in the request's own text first, then in the corpus."""

    def __init__(self, request: Request, corpus: Corpus | None, kept_tokens: int) -> None:
        self._request, self._corpus = request, corpus
        self._index = TextIndex(kept_tokens)
        self.grade = 0  # how many tokens agreed in the last proposal

    def propose(self, history: Sequence[int], limit: int) -> Sequence[int]:
        self._index.extend(history[len(self._index) :])
        found, self.grade = self._index.find(limit)
        if self._corpus is not None and self.grade < LONGEST:
            other, grade = self._corpus.find(history[-LONGEST:], limit)
            if grade > self.grade:
                found, self.grade = other, grade
        return found if self._request.grammar is None or not found else self._allowed(found)

    def _allowed(self, tokens: Sequence[int]) -> Sequence[int]:
        """As many of them as the shape of the answer allows."""
        assert self._request.grammar is not None
        grammar = self._request.grammar.fork()
        for place, token in enumerate(tokens):
            if grammar.is_finished() or not grammar.allowed()[token]:
                return tokens[:place]
            grammar.advance(token)
        return tokens

    def waiting_s(self, history: Sequence[int]) -> float:
        """Reading what it has not seen costs about a microsecond a token."""
        return 1e-6 * (len(history) - len(self._index))

    def observe(self, accepted: Sequence[int]) -> None:
        """The history says all."""

    def close(self) -> None:
        """Nothing is held."""


class Ngrams(NamedTuple):
    """Prompt lookup for every request of a runtime."""

    corpus: Corpus | None = None
    kept_tokens: int = KEPT_TOKENS
    name: str = "ngram"
    tokens: int = 15

    @property
    def bytes(self) -> int:
        """What the corpus takes; the index of a text grows with it."""
        return self.corpus.bytes if self.corpus else 0

    def start(self, request: Request) -> NgramDrafter:
        return NgramDrafter(request, self.corpus, self.kept_tokens)

    def draft_s(self, tokens: int) -> float:
        """A lookup behind a step of a model, which has emptied the caches."""
        return 15e-6

    def close(self) -> None:
        """Nothing is held."""
