"""Limits on the requests that a server accepts. Others are refused, with the seconds after which to retry."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from edgekit.apps.serve.keys import Key
from edgekit.apps.serve.models import ServedModel
from edgekit.apps.serve.pool import PooledModel
from edgekit.apps.serve.problems import ApiError
from edgekit.apps.serve.settings import ServerSettings

MAX_QUEUED_TOKENS = 262_144  # that may wait for one model: a few prompts of the longest contexts, a megabyte of ids
_LONGEST_WAIT_S = 60
_WEIGHT = 0.1  # of the newest answer in the moving mean of seconds


class Admission:
    """Counts running and waiting answers for each model and each key. Used by the event loop only."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._answers: Counter[PooledModel] = Counter()
        self._tokens: Counter[PooledModel] = Counter()
        self._keys: Counter[str] = Counter()
        self._mean_s = 1.0
        self.rejected: Counter[str] = Counter()  # by reason
        self.is_draining = False

    @property
    def active(self) -> int:
        """The number of running and waiting answers."""
        return self._answers.total()

    def is_full(self, model: PooledModel) -> bool:
        """Return True if another answer of this model would be refused."""
        return self._answers[model] >= model.sequences + self._settings.max_queued

    def check(self, served: ServedModel) -> None:
        """Refuse a call now if it would be refused anyway after waiting for its model to be opened."""
        self._check_draining()
        model = served.model
        if model.state != "ready" and model.users >= model.sequences + self._settings.max_queued:
            raise self._refused("loading", 503, "too many requests wait for this model to be opened", 5)

    @contextmanager
    def slots(self, served: ServedModel, key: Key, count: int) -> Iterator[None]:
        """Count `count` answers until the block ends. Raises `ApiError` if a limit is reached."""
        model = served.model
        self._check_draining()
        if self._keys[key.name] >= self._settings.max_per_key and key.name:
            raise self._refused("key", 429, f"this key has {self._settings.max_per_key} requests running; wait for one")
        if self._answers[model] + count > max(count, model.sequences + self._settings.max_queued):
            raise self._refused("requests", 503, "too many requests are waiting", self._estimated_s(model))
        self._answers[model] += count
        self._keys[key.name] += 1
        try:
            yield
        finally:
            self._answers[model] -= count
            self._keys[key.name] -= 1

    @contextmanager
    def prompt_tokens(self, served: ServedModel, count: int) -> Iterator[None]:
        """Count the tokens of a waiting prompt until the block ends. A prompt is never refused if no other waits."""
        model = served.model
        if self._tokens[model] and self._tokens[model] + count > MAX_QUEUED_TOKENS:
            raise self._refused("tokens", 503, "too many prompt tokens are waiting", self._estimated_s(model))
        self._tokens[model] += count
        try:
            yield
        finally:
            self._tokens[model] -= count

    def observe(self, seconds: float) -> None:
        """Add the duration of an answer to the moving mean."""
        self._mean_s += _WEIGHT * (seconds - self._mean_s)

    def _estimated_s(self, model: PooledModel) -> int:
        """Estimate the seconds until an answer ends: the mean duration over the number of concurrent answers."""
        return math.ceil(min(_LONGEST_WAIT_S, max(1.0, self._mean_s / model.sequences)))

    def _check_draining(self) -> None:
        if self.is_draining:
            raise self._refused("draining", 503, "the server is being stopped")

    def _refused(self, reason: str, status: int, message: str, after_s: int = 1) -> ApiError:
        self.rejected[reason] += 1
        code = {"key": "rate_limit_exceeded", "draining": "draining"}.get(reason, "server_overloaded")
        return ApiError(status, f"{message}; try again in {after_s} s", code=code, retry_after_s=after_s)
