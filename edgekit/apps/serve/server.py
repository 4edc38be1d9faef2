"""Run the application with uvicorn, with deadlines for slow senders and a graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgekit.apps.serve.application import application
from edgekit.apps.serve.settings import LOOPBACK, ServerSettings
from edgekit.common.log import log
from edgekit.errors import InvalidInput

if TYPE_CHECKING:
    from types import FrameType

    from edgekit.apps.serve.service import Service

HEADERS_S = 10.0  # from the connection, or the first byte of a later request, to the end of the headers
_KEEP_ALIVE_S = 75
_MOST_CONNECTIONS = 1024
_BACKLOG = 512
_NO_FILES = "no file is left for more connections; raise the limit (`ulimit -n`)"
_MOST_FILES, _OTHER_FILES = 4096, 96  # to ask the system for; and those that are no connections


def check_exposure(settings: ServerSettings) -> None:
    """Refuse to listen where other machines can call without a key."""
    if settings.host not in LOOPBACK and settings.api_key_file is None:
        raise InvalidInput(
            f"--host {settings.host}: others could use this server; give --api-key-file, or listen on 127.0.0.1"
        )


def listen(settings: ServerSettings) -> socket.socket:
    """Return a socket that listens on the host and port of the settings."""
    check_exposure(settings)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)  # clients may connect at once; they wait until the server runs
            stack.pop_all()  # it stays open
    except OSError as error:
        raise InvalidInput(
            f"{settings.host}:{settings.port}: cannot be listened on: {error.strerror}; choose another port"
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def allowed_connections() -> int:
    """Return how many connections may be open, after asking the system for more files."""
    if sys.platform == "win32":  # has no such limit
        return _MOST_CONNECTIONS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(8, min(_MOST_CONNECTIONS, soft - _OTHER_FILES))


def run(service: Service, listener: socket.socket) -> None:
    """Serve until the process is told to end."""
    for name in ("uvicorn", "uvicorn.error"):  # the guard logs one line for each request
        logging.getLogger(name).addHandler(logging.NullHandler())
        logging.getLogger(name).propagate = False
    logging.getLogger("asyncio").addFilter(_NoFlood())
    if not log.isEnabledFor(logging.INFO):  # otherwise EDGEKIT_LOG writes all of it
        warnings = logging.StreamHandler()
        warnings.setFormatter(logging.Formatter("edgekit: %(message)s"))
        log.addHandler(warnings)
    DeadlineProtocol.most_connections = allowed_connections()
    config = uvicorn.Config(
        application(service),
        http=DeadlineProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        limit_concurrency=2 * _MOST_CONNECTIONS,  # idle connections are closed before
    )
    DrainingServer(config, service).run([listener])


class _NoFlood(logging.Filter):
    """Drops the log lines that asyncio would write for every connection."""

    def __init__(self) -> None:
        super().__init__()
        self._told_of_files = False

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text.startswith("socket.accept() out of system resource"):  # tried again each second
            is_first, self._told_of_files = not self._told_of_files, True
            record.msg, record.args, record.exc_info = f"edgekit: {_NO_FILES}", (), None
            return is_first
        # A client that leaves while several pieces are ready: their writes fail before the loop hears that it left.
        return text != "socket.send() raised exception."


class DrainingServer(uvicorn.Server):
    """A server that drains before it exits: refuses new requests, then waits a limited time for running answers."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, exit at once on the second."""
        if self._service.admission.is_draining:
            self.should_exit = self.force_exit = True
            self._captured_signals.append(sig)
            return
        self._service.admission.is_draining = True
        asyncio.get_running_loop().call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._service.settings.drain_s):
                while self._service.admission.active:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            for runtime in self._service.models.runtimes.values():
                runtime.cancel_all()
            for _ in range(100):  # let their clients receive the error
                if not self._service.admission.active:
                    break
                await asyncio.sleep(0.02)
        self.should_exit = True


class DeadlineProtocol(H11Protocol):
    """A connection that is closed if a request's headers do not arrive in time, or newer connections need its slot."""

    most_connections = _MOST_CONNECTIONS
    _timer: asyncio.TimerHandle | None = None
    _made_at = 0.0

    def connection_made(self, transport: Any) -> None:
        """Start the deadline of the first request. Where too many are open, the oldest without a request is closed."""
        super().connection_made(transport)
        self._made_at = self.loop.time()
        self._arm()
        if len(self.connections) > self.most_connections:
            idle = [each for each in self.connections if isinstance(each, DeadlineProtocol) and each.is_idle]
            min(idle, key=lambda each: each._made_at).transport.close()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    def data_received(self, data: bytes) -> None:
        """Keep the deadline while headers are incomplete."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()
        elif self._timer is None:
            self._arm()

    def on_response_complete(self) -> None:
        """Start the deadline of a request whose first bytes came while another was answered."""
        super().on_response_complete()
        if self.is_idle and self._timer is None and self.conn.trailing_data[0]:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        self._timer = self.loop.call_later(HEADERS_S, self._end)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
