"""The state that all requests of one server share."""

from __future__ import annotations

import time
from typing import NamedTuple

from edgekit.apps.serve.admission import Admission
from edgekit.apps.serve.keys import Keys, read_keys
from edgekit.apps.serve.metrics import ServerMetrics
from edgekit.apps.serve.models import Models
from edgekit.apps.serve.settings import ServerSettings
from edgekit.errors import InvalidInput, quote_short

BODY_BYTES = 4 << 20  # tools, schemas and the names of fields
BYTES_OF_A_TOKEN = 32  # four characters, each of which JSON may escape, take 24


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
