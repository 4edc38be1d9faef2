"""Counters of a server; runtimes have their own."""

from __future__ import annotations

from collections import Counter

from edgekit.common.histogram import REQUEST_S, Histogram


class ServerMetrics:
    """The counters of a server, of the event loop only. The runtimes' own are read when they are shown."""

    def __init__(self) -> None:
        self.http: Counter[tuple[str, str, str]] = Counter()  # by route, method and class of status
        self.http_s: dict[str, Histogram] = {}
        self.disconnected = self.failed_streams = 0
        self.overflows: Counter[tuple[str, str]] = Counter()  # by destination and reason

    def count_http(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request that ended. Routes and methods are few: a client cannot make new series."""
        known = method if method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE") else "other"
        self.http[route, known, f"{status // 100}xx"] += 1
        self.http_s.setdefault(route, Histogram(REQUEST_S)).observe(seconds)
