"""A server of this process on a free port, over runtimes with a fake engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import uvicorn
from runtimes import codec, make_runtime

from edgekit.apps.serve.application import application
from edgekit.apps.serve.models import Models
from edgekit.apps.serve.pool import OnDemand, PoolSettings
from edgekit.apps.serve.server import DeadlineProtocol, DrainingServer, address_of, listen
from edgekit.apps.serve.service import Service
from edgekit.apps.serve.settings import ServerSettings
from edgekit.runtime.runtime import Runtime
from edgekit.testing import FakeEngine


class Served(NamedTuple):
    """A running server."""

    url: str
    service: Service
    runtime: Runtime  # the first model, where it came open
    server: DrainingServer

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


class SlowEngine(FakeEngine):
    """Delays each call, so that a test can act in between."""

    def __init__(self, seconds: float, **given: Any) -> None:
        super().__init__(vocabulary=codec().vocabulary, max_states=8, **given)
        self.seconds = seconds

    def forward(self, chunks: Sequence[Any]) -> Any:
        time.sleep(self.seconds)
        return super().forward(chunks)


@contextmanager
def serving(
    runtimes: Mapping[str, Runtime | OnDemand] | None = None,
    aliases: Mapping[str, str] | None = None,
    pool: PoolSettings | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Serve `runtimes`, or one named `tiny`, until the block ends."""
    served: dict[str, Any] = dict(runtimes or {"tiny": make_runtime(prefix_bytes=1 << 20)})
    service = Service.of(Models(served, aliases, pool), ServerSettings(port=0, **settings))
    listener = listen(service.settings)
    config = uvicorn.Config(
        application(service), http=DeadlineProtocol, ws="none", lifespan="on", log_config=None, access_log=False,
        server_header=False, timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = DrainingServer(config, service)
    thread = threading.Thread(target=lambda: server.run([listener]), daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started)
        yield Served(address_of(listener), service, next(iter(served.values())), server)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"


def eventually(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Wait until `condition` holds."""
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.01)
