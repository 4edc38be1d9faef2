"""The number of threads for small calls, chosen by the time that they take.

Threads that share every operator wait for the slowest of them. Where another program uses one of the cores, half of the
threads can be several times as fast. Nothing is asked of the system: calls are timed, a few run with other numbers of
threads, and what was faster stays.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from edgekit.common.log import log

MOST_TOKENS = 16  # of a small call; in larger ones, threads wait for each other rarely
_KEPT = 8  # calls whose median says how long one takes now
_TRIED = 3  # calls of an attempt
_SLOWER = 1.5  # times the usual time, from where on fewer threads are tried
_PAYS = 0.9  # an attempt must need at most this share of the time
_HOPELESS = 2.0  # a first call that takes this many times the usual time ends the attempt
_PATIENCE = 32, 512  # calls until one thread more is tried; doubled after each attempt in vain


class ThreadChoice:
    """Chooses threads for calls of up to `MOST_TOKENS` tokens, which differ in time by their number."""

    def __init__(self, most: int) -> None:
        self.most = self._latest = most
        self._by_tokens: dict[int, _Settled] = {}

    def threads(self, tokens: int) -> int:
        """Return the number of threads for the next call, which has `tokens` tokens."""
        return self._of(tokens).threads if tokens <= MOST_TOKENS else self.most

    def note(self, tokens: int, seconds: float) -> None:
        """Learn from a call that ran with `threads(tokens)`."""
        if tokens <= MOST_TOKENS and self.most > 1:
            chosen = self._of(tokens)
            before = chosen.settled
            chosen.note(seconds)
            self._latest = chosen.settled
            if before != self._latest:
                log.info("calls of %d tokens take %d of %d threads from now on", tokens, self._latest, self.most)

    def _of(self, tokens: int) -> _Settled:
        if tokens not in self._by_tokens:
            self._by_tokens[tokens] = _Settled(self.most, self._latest)
        return self._by_tokens[tokens]


class _Settled:
    """The choice for calls of one size: a settled number, and attempts with half of it or with one thread more."""

    def __init__(self, most: int, settled: int) -> None:
        self._most, self.settled = most, settled
        self.threads = settled
        self._times: deque[float] = deque(maxlen=_KEPT)  # of calls with the settled number
        self._tried: list[float] = []
        self._usual = 0.0  # the median where nothing is slow; 0 until the first attempt
        self._patience, self._waited = _PATIENCE[0], 0

    def note(self, seconds: float) -> None:
        if self.threads != self.settled:
            self._tried.append(seconds)
            if len(self._tried) == _TRIED or seconds > _HOPELESS * median(self._times):
                self._judge()
            return
        self._times.append(seconds)
        self._waited += 1
        if len(self._times) < _KEPT:
            return
        now = median(self._times)
        is_slow = now > _SLOWER * self._usual  # true of the first calls, so fewer threads are tried once
        self._usual = min(self._usual or now, now)
        if is_slow and self.settled > 1:
            self._try(self.settled // 2)
        elif self.settled < self._most and self._waited >= self._patience:
            self._try(self.settled + 1)

    def _try(self, threads: int) -> None:
        self.threads, self._tried, self._waited = threads, [], 0

    def _judge(self) -> None:
        """Settle on the number that was tried if it pays, or return to the one before."""
        before, now = median(self._times), median(self._tried)
        if now <= _PAYS * before:
            self.settled, self._patience = self.threads, _PATIENCE[0]
            self._usual = min(self._usual, now)
            self._times.clear()
            return
        if self.threads > self.settled:
            self._patience = min(2 * self._patience, _PATIENCE[1])
        elif self.threads > 1 and now <= _HOPELESS * before:
            self._try(self.threads // 2)
            return
        else:
            self._usual = before  # a lasting cause of slow calls, such as a longer text, is usual from now on
        self.threads = self.settled
