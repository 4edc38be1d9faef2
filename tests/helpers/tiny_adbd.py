"""The phone's end of adb's wire, for tests with the real client: a shell and files over the folder of a `Phone`.

Only what a push, a pull and a shell command need: messages of 24 bytes and their data, streams that are acknowledged
packet by packet, the `shell` service with and without exit codes, and `sync`. No authentication.
"""

from __future__ import annotations

import queue
import socket
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

from fake_adb import Phone

_HEADER = struct.Struct("<4s5I")  # command, two arguments, length, checksum, magic
_PACKET = struct.Struct("<BI")  # of the shell: which stream, length
_SYNC = struct.Struct("<4sI")
_VERSION, _MOST = 0x01000001, 256 << 10
_STDOUT, _STDERR, _EXIT = 1, 2, 3


class Adbd:
    """Listens until it is closed; `cut_at` is a word of a shell command at which the cable comes off."""

    def __init__(self, phone: Phone, *, features: str = "shell_v2,cmd", cut_at: str | None = None) -> None:
        self.phone, self.features, self.cut_at = phone, features, cut_at
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=_Connection(self, connection).serve, daemon=True).start()


class _Connection:
    """One host that is connected."""

    def __init__(self, adbd: Adbd, connection: socket.socket) -> None:
        self.adbd, self._socket = adbd, connection
        self._sending = threading.Lock()
        self._streams: dict[int, _Stream] = {}

    def serve(self) -> None:
        try:
            while True:
                command, first, second, length, _, _ = _HEADER.unpack(self._read(_HEADER.size))
                self._take(command, first, second, self._read(length))
        except OSError:
            for stream in self._streams.values():
                stream.put(None)

    def cut(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, command: bytes, first: int, second: int, data: bytes = b"") -> None:
        magic = struct.unpack("<I", command)[0] ^ 0xFFFFFFFF
        with self._sending:
            self._socket.sendall(_HEADER.pack(command, first, second, len(data), sum(data) & 0xFFFFFFFF, magic) + data)

    def _take(self, command: bytes, first: int, second: int, data: bytes) -> None:
        if command == b"CNXN":
            about = "".join(f"ro.product.{name}=tiny;" for name in ("name", "model", "device"))
            self.send(b"CNXN", _VERSION, _MOST, f"device::{about}features={self.adbd.features}".encode())
        elif command == b"OPEN":
            mine = len(self._streams) + 1
            self._streams[mine] = stream = _Stream(self, mine, first, data.rstrip(b"\0").decode())
            self.send(b"OKAY", mine, first)
            threading.Thread(target=stream.serve, daemon=True).start()
        elif command == b"WRTE":
            self.send(b"OKAY", second, first)
            self._streams[second].put(data)
        elif command == b"OKAY":
            self._streams[second].may_send.release()
        elif command == b"CLSE" and second in self._streams:
            self._streams[second].put(None)

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self._socket.recv(count - len(found))
            if not part:
                raise OSError("the host is gone")
            found += part
        return found


class _Stream:
    """One service that a host opened."""

    def __init__(self, connection: _Connection, mine: int, theirs: int, service: str) -> None:
        self._connection, self._mine, self._theirs, self._service = connection, mine, theirs, service
        self.may_send = threading.Semaphore(1)
        self._given: queue.Queue[bytes | None] = queue.Queue()
        self._held = b""

    def put(self, data: bytes | None) -> None:
        self._given.put(data)

    def serve(self) -> None:
        try:
            if self._service == "sync:":
                self._files()
            else:
                self._shell(*self._service.split(":", 1))
            self._connection.send(b"CLSE", self._mine, self._theirs)
        except (OSError, EOFError):
            return

    def _write(self, data: bytes) -> None:
        for start in range(0, len(data), _MOST):
            self.may_send.acquire()
            self._connection.send(b"WRTE", self._mine, self._theirs, data[start : start + _MOST])

    def _read(self, count: int) -> bytes:
        while len(self._held) < count:
            part = self._given.get(timeout=60)
            if part is None:
                raise EOFError
            self._held += part
        found, self._held = self._held[:count], self._held[count:]
        return found

    def _shell(self, kind: str, command: str) -> None:
        phone, cut_at = self._connection.adbd.phone, self._connection.adbd.cut_at
        is_new = "v2" in kind.split(",")
        running: subprocess.Popen[Any] = subprocess.Popen(
            ["/bin/sh", "-c", command],
            cwd=phone.data,
            env={"PATH": f"{phone.folder / 'bin'}:/usr/bin:/bin", "HOME": "/"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if is_new else subprocess.STDOUT,
        )
        if cut_at is not None and cut_at in command:
            self._connection.cut()
            running.communicate()
            return
        out, err = running.communicate()
        if not is_new:
            self._write(out.replace(b"\n", b"\r\n"))
            return
        for stream, data in ((_STDOUT, out), (_STDERR, err), (_EXIT, bytes([running.returncode & 0xFF]))):
            if data:
                self._write(_PACKET.pack(stream, len(data)) + data)

    def _files(self) -> None:
        while True:
            asked, length = _SYNC.unpack(self._read(_SYNC.size))
            name = self._read(length).decode()
            if asked == b"QUIT":
                return
            if asked == b"STAT":
                self._stat(Path(name))
            elif asked == b"SEND":
                self._receive(Path(name.rpartition(",")[0]))
            elif asked == b"RECV":
                self._give(Path(name))

    def _stat(self, path: Path) -> None:
        found = path.stat() if path.exists() else None
        facts = (found.st_mode, found.st_size & 0xFFFFFFFF, int(found.st_mtime)) if found else (0, 0, 0)
        self._write(b"STAT" + struct.pack("<3I", *facts))

    def _receive(self, path: Path) -> None:
        data = b""
        while True:
            asked, length = _SYNC.unpack(self._read(_SYNC.size))
            if asked == b"DONE":  # its length is a time
                break
            data += self._read(length)
        try:
            path.write_bytes(data)
        except OSError as error:
            why = f"couldn't create file: {error.strerror}".encode()
            self._write(_SYNC.pack(b"FAIL", len(why)) + why)
            return
        self._write(_SYNC.pack(b"OKAY", 0))

    def _give(self, path: Path) -> None:
        data = path.read_bytes()
        for start in range(0, len(data), 64 << 10):
            part = data[start : start + (64 << 10)]
            self._write(_SYNC.pack(b"DATA", len(part)) + part)
        self._write(_SYNC.pack(b"DONE", 0))
