"""Reads ranges of a site's files over HTTPS and, if the caller allows it, over plain HTTP or from a folder.

Requests go only to the given URL, if need be through a proxy from the environment or the caller. Redirects outside the
URL are refused.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass, url2pathname

from edgekit.common.files import open_regular
from edgekit.common.system import read_at
from edgekit.errors import InvalidInput, TransferFailed, quote_short

_BLOCK = 64 << 10
_MOST_REDIRECTS = 3
_HEADER_PHASES = 2  # connecting, and waiting for the headers
SLOWEST_BYTES_PER_S = 1024  # of a pull, all its connections together; anything slower ends
_STALLED_BYTES_PER_S = 16  # of one of several connections
_LONGEST_WAIT_S = 60.0
_RETRIED = {408, 425, 429, 500, 502, 503, 504}
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class RangesMissing(TransferFailed):
    """The server sends only whole files; read all ranges of a file together."""


class Connection(Protocol):
    """One connection, used by one thread."""

    sends_ranges: bool  # False: each read begins at the beginning of the file

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield exactly the bytes from `start` to `stop` of a file. Raises `TransferFailed`."""

    def read_whole(self, name: str, most: int) -> bytes:
        """Return a whole file of at most `most` bytes."""

    def close(self) -> None: ...


class Site:
    """A site at a URL; `connect` opens a connection."""

    def __init__(
        self, url: str, *, allow: Sequence[str] = (), proxy: str | None = None, timeout_s: float = 30.0
    ) -> None:
        parts = _split(url)
        if parts.scheme not in ("https", "http", "file"):
            raise InvalidInput(f"{quote_short(url)}: is not the URL of a site; give one that begins with https://")
        if parts.scheme != "https" and parts.scheme not in allow:
            kind = "is not encrypted" if parts.scheme == "http" else "is a folder of this machine"
            raise InvalidInput(f"{quote_short(url)}: {kind}; allow it with --allow {parts.scheme}")
        if parts.query or parts.fragment or parts.username:
            raise InvalidInput(f"{quote_short(url)}: a site's URL has no user, query or fragment")
        if parts.scheme != "file" and not parts.hostname:
            raise InvalidInput(f"{quote_short(url)}: names no host")
        self.url = url.rstrip("/") + "/"
        self._parts, self._timeout_s, self._proxy = urlsplit(self.url), timeout_s, proxy

    def connect(self) -> Connection:
        """Return a connection; the network is first used by its first read."""
        if self._parts.scheme == "file":
            if self._parts.netloc not in ("", "localhost"):
                raise InvalidInput(f"{quote_short(self.url)}: names another machine; give file:///PATH of this one")
            return FolderConnection(Path(url2pathname(unquote(self._parts.path))))
        return HttpConnection(self.url, self._parts, self._chosen_proxy(), self._timeout_s)

    def _chosen_proxy(self) -> SplitResult | None:
        host, port = self._parts.hostname or "", self._parts.port
        chosen = self._proxy
        if chosen is None and not proxy_bypass(f"{host}:{port}" if port else host):
            known = getproxies()
            chosen = known.get(self._parts.scheme) or known.get("all")
        if not chosen:
            return None
        parts = _split(chosen if "//" in chosen else f"http://{chosen}")
        if parts.scheme != "http" or not parts.hostname:
            raise InvalidInput(f"proxy {quote_short(chosen)}: must be http://HOST:PORT")
        return parts


class FolderConnection:
    """A site in a folder of this machine."""

    sends_ranges = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        with self._opened(name) as handle:
            while start < stop:
                block = read_at(handle, min(_BLOCK, stop - start), start)
                if not block:
                    raise TransferFailed(f"{self._folder / name}: ends at {start:,}, {stop:,} bytes were announced")
                start += len(block)
                yield block

    def read_whole(self, name: str, most: int) -> bytes:
        with self._opened(name) as handle:
            size = os.fstat(handle).st_size
            if size > most:
                raise TransferFailed(f"{self._folder / name}: has {size:,} bytes, {most:,} are allowed")
            return b"".join(self.read(name, 0, size))

    def close(self) -> None:
        pass

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        try:
            file = open_regular(self._folder / name)
        except OSError as error:
            raise TransferFailed(f"{self._folder / name}: {error.strerror}", is_passing=False) from error
        with file:
            yield file.fileno()


class HttpConnection:
    """A connection to a web server, kept open between requests."""

    def __init__(self, url: str, parts: SplitResult, proxy: SplitResult | None, timeout_s: float) -> None:
        self._url, self._parts, self._proxy, self._timeout_s = url, parts, proxy, timeout_s
        self._client: http.client.HTTPConnection | None = None
        self.sends_ranges = True

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        with self._answer(name, {"Range": f"bytes={start}-{stop - 1}"}) as answer:
            if answer.status == 200:
                self.sends_ranges = False
                if start > 0:
                    raise RangesMissing(f"{name}: the server sends no ranges")
                yield from self._body(name, answer, stop)
                return
            span = _CONTENT_RANGE.fullmatch(answer.getheader("Content-Range", ""))
            if span is None or (int(span[1]), int(span[2]) + 1) != (start, stop):
                found = quote_short(answer.getheader("Content-Range"))
                raise TransferFailed(f"{name}: bytes {start}-{stop - 1} were asked for, the server sent range {found}")
            if answer.length is not None and answer.length != stop - start:
                raise TransferFailed(
                    f"{name}: the server announced {answer.length:,} bytes for a range of {stop - start:,}"
                )
            yield from self._body(name, answer, stop - start)

    def read_whole(self, name: str, most: int) -> bytes:
        with self._answer(name, {}) as answer:
            if answer.length is None:
                raise TransferFailed(f"{name}: the server states no length; serve files as they are", is_passing=False)
            if answer.length > most:
                raise TransferFailed(f"{name}: has {answer.length} bytes, at most {most:,} are allowed")
            return b"".join(self._body(name, answer, answer.length, SLOWEST_BYTES_PER_S))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _body(
        self, name: str, answer: http.client.HTTPResponse, wanted: int, slowest_bytes_per_s: int = _STALLED_BYTES_PER_S
    ) -> Iterator[bytes]:
        """Yield the first `wanted` bytes. Raises `TransferFailed` if the body ends early or is too slow."""
        received, began = 0, time.monotonic()
        while received < wanted:
            block = answer.read1(min(_BLOCK, wanted - received))
            if not block:
                raise TransferFailed(f"{name}: the connection ended after {received:,} of {wanted:,} bytes")
            elapsed = time.monotonic() - began
            if elapsed > self._timeout_s and received < slowest_bytes_per_s * elapsed:
                raise TransferFailed(f"{name}: the server stalled: {received:,} bytes in {elapsed:.0f} s")
            received += len(block)
            yield block

    @contextmanager
    def _answer(self, name: str, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        """Request a file. The connection is dropped unless the whole answer is read."""
        try:
            answer = self._asked(urlsplit(self._url + name).path, name, headers)
            yield answer
            if not answer.isclosed():
                self.close()
        except TransferFailed:
            self.close()
            raise
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise TransferFailed(
                f"{self._url}: its certificate is not trusted: {error.verify_message}", is_passing=False
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            if isinstance(error, TimeoutError):
                reason = "the server stalled"
            raise TransferFailed(f"{self._url}{name}: {reason}; check the URL and the network") from error
        except BaseException:
            self.close()
            raise

    def _asked(self, path: str, name: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        for _ in range(_MOST_REDIRECTS + 1):
            answer = self._sent(path, headers)
            if answer.status in (200, 206):
                if answer.getheader("Content-Encoding", "identity") != "identity":
                    raise TransferFailed(f"{name}: the server changed its encoding; serve files as they are")
                return answer
            if answer.status in (301, 302, 303, 307, 308):
                path = self._redirected(path, answer.getheader("Location", ""), name)
                self.close()
                continue
            raise TransferFailed(
                f"{self._url}{name}: the server answered {answer.status} {quote_short(answer.reason)}; check the URL,"
                " or tell its publisher",
                is_passing=answer.status in _RETRIED,
                wait_s=_seconds(answer.getheader("Retry-After", "")),
            )
        raise TransferFailed(f"{name}: more than {_MOST_REDIRECTS} redirects", is_passing=False)

    def _redirected(self, path: str, location: str, name: str) -> str:
        try:
            target = urljoin(urljoin(self._url, path), location)
        except ValueError:  # no URL at all
            target = location
        if not target.startswith(self._url) or "/.." in unquote(target):
            raise TransferFailed(
                f"{name}: the server redirects to {quote_short(target)}, outside {self._url}; nothing else is asked",
                is_passing=False,
            )
        return urlsplit(target).path

    def _sent(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        if self._client is None:
            self._client = self._connected()
        target = path
        headers = {"Accept-Encoding": "identity", "User-Agent": "edgekit", **headers}
        if self._proxy is not None and self._parts.scheme == "http":
            target = f"http://{self._parts.netloc}{path}"
            headers |= _authorization(self._proxy)
        with self._deadline(self._client):
            self._client.request("GET", target, headers=headers)
            return self._client.getresponse()

    @contextmanager
    def _deadline(self, client: http.client.HTTPConnection) -> Iterator[None]:
        """Limit the time until the headers of an answer are read; a socket's limit begins again with every byte."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            with suppress(OSError, AttributeError):  # it is closed already, or not connected yet
                socket.socket.shutdown(client.sock, socket.SHUT_RDWR)  # below TLS, which another thread reads

        timer = threading.Timer(_HEADER_PHASES * self._timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (OSError, http.client.HTTPException):
            if not is_late.is_set():
                raise
        finally:
            timer.cancel()
        if is_late.is_set():
            raise TimeoutError

    def _connected(self) -> http.client.HTTPConnection:
        place = self._proxy or self._parts
        port = place.port or (_DEFAULT_PORTS[self._parts.scheme] if self._proxy is None else 80)
        host = place.hostname or ""
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        client = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=ssl.create_default_context())
        if self._proxy is not None:
            client.set_tunnel(self._parts.hostname or "", self._parts.port or 443, _authorization(self._proxy))
        return client


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.port == 0:
            raise ValueError("port 0")
    except ValueError as error:
        raise InvalidInput(f"{quote_short(url)}: is no URL: {error}; check its host and port") from error
    return parts


def _authorization(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def _seconds(text: str) -> float | None:
    return min(float(text), _LONGEST_WAIT_S) if text.isdecimal() and len(text) < 9 else None
