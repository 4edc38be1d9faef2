"""A web server over a folder, which counts what it is asked and can misbehave on demand."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Asked(NamedTuple):
    """One request for bytes of a file."""

    name: str
    start: int
    stop: int


class Fault(NamedTuple):
    """One misbehaviour: what is sent instead of the answer."""

    status: int | None = None
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed
    change: Callable[[bytes], bytes] = bytes
    announced: int | None = None  # Content-Length
    send: int | None = None  # bytes, before the connection is cut
    stall_s: float = 0.0


class SiteServer:
    """A running server. `fault` is asked before each answer, with the request's number among those of files."""

    def __init__(self, folder: Path, certificate: Path | None = None) -> None:
        self.folder, self.asked, self.fault = folder, list[Asked](), lambda number, asked: None
        self.sends_ranges, self.throttle_s = True, 0.0
        self.paths, self.released = list[str](), threading.Event()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # clients that are killed

        self.server = Server(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            # The handshake belongs to the thread of a request: a client that refuses must not stop the server.
            self.server.socket = context.wrap_socket(
                self.server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"http{'s' * (certificate is not None)}://127.0.0.1:{self.server.server_port}/"

    fault: Callable[[int, Asked], Fault | None]

    @property
    def file_bytes(self) -> int:
        return sum(each.stop - each.start for each in self.asked)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        name = handler.path.lstrip("/")
        with self._lock:
            self.paths.append(handler.path)
        path = self.folder / name
        if not path.is_file():
            handler.send_error(404)
            return
        size = path.stat().st_size
        match = _RANGE.fullmatch(handler.headers.get("Range", "")) if self.sends_ranges else None
        asked = Asked(name, int(match[1]), min(size, int(match[2]) + 1)) if match else Asked(name, 0, size)
        fault = None
        if name.startswith("files/"):
            with self._lock:
                self.asked.append(asked)
                number = len(self.asked)
            fault = self.fault(number, asked)
        fault = fault or Fault()
        data = fault.change(path.read_bytes()[asked.start : asked.stop])
        handler.send_response(fault.status or (206 if match else 200))
        headers = {"Content-Length": str(len(data) if fault.announced is None else fault.announced)}
        if match:
            headers["Content-Range"] = f"bytes {asked.start}-{asked.stop - 1}/{size}"
        for key, value in {**headers, **fault.headers}.items():
            handler.send_header(key, value)
        handler.end_headers()
        sent = data if fault.send is None else data[: fault.send]
        for start in range(0, len(sent), 64 << 10):
            handler.wfile.write(sent[start : start + (64 << 10)])
            handler.wfile.flush()
            if self.throttle_s:
                self.released.wait(self.throttle_s)
        if fault.stall_s:
            self.released.wait(fault.stall_s)
        if fault.send is not None:
            handler.close_connection = True


@contextmanager
def site_server(folder: Path, certificate: Path | None = None) -> Iterator[SiteServer]:
    """Serve a folder until the block ends; over TLS with `certificate`, a PEM file with its key."""
    running = SiteServer(folder, certificate)
    thread = threading.Thread(target=running.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield running
    finally:
        running.released.set()
        running.server.shutdown()
        running.server.server_close()
        thread.join()
