"""The state that all requests of one server share."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

from edgekit.apps.serve.admission import Admission
from edgekit.apps.serve.keys import Keys, read_keys
from edgekit.apps.serve.models import Models
from edgekit.apps.serve.settings import ServerSettings
from edgekit.common.histogram import REQUEST_S, Histogram
from edgekit.errors import InvalidInput, quote_short

BODY_BYTES = 4 << 20  # tools, schemas and the names of fields
BYTES_OF_A_TOKEN = 32  # four characters, each of which JSON may escape, take 24


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


class Service(NamedTuple):
    """The models, the limits, the keys and the counters of one server."""

    settings: ServerSettings
    models: Models
    keys: Keys
    admission: Admission
    metrics: ServerMetrics
    started_at: float

    @property
    def max_body(self) -> int:
        """The most bytes of a request."""
        return BODY_BYTES + BYTES_OF_A_TOKEN * max(model.context for model in self.models.pool.models)

    @staticmethod
    def of(models: Models, settings: ServerSettings) -> Service:
        """Make a service with the keys from the settings' key file."""
        smaller = settings.overflow_model
        if smaller is not None and smaller not in models.names():
            known = ", ".join(models.names())
            raise InvalidInput(f"the overflow model {quote_short(smaller)} is not served; name one of {known}")
        keys = read_keys(settings.api_key_file) if settings.api_key_file is not None else Keys()
        return Service(settings, models, keys, Admission(settings), ServerMetrics(), time.time())
