"""Sites that waste a device's disk or time: each pull ends in one line."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_artifacts import install
from published import device_profile, make_artifact

from edgekit.apps.delivery import fetching, publish, pull
from edgekit.apps.delivery.fetching import FetchLimits
from edgekit.apps.delivery.site_index import INDEX, SiteIndex, manifest_name
from edgekit.apps.delivery.transport import Connection, Site
from edgekit.common.sealed_json import to_sealed_json
from edgekit.contracts.installed import VERSIONS
from edgekit.contracts.manifest import FileChunk, FileFact
from edgekit.errors import DamagedArtifact, InvalidInput, OutOfSpace, TransferFailed


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for sites."""
    install(tmp_path / "target", monkeypatch)
    monkeypatch.setattr(fetching, "_FIRST_WAIT_S", 0.001)
    return tmp_path


def _pull(shop: Path, **options: object) -> object:
    given = {"device": device_profile(shop), "allow": ("file", "http"), "timeout_s": 5.0, **options}
    return pull((shop / "site").as_uri(), shop / "app", **given)  # type: ignore[arg-type]


def _forge(shop: Path, name: str, file: FileFact, announced: int | None, path: str = "large.bin") -> None:
    """Publish an artifact whose manifest lists one file more; the index says `announced` bytes, or their sum."""
    made = make_artifact(shop / name, seed=int(name))
    publish([made.folder], shop / "site", release=name)
    data = to_sealed_json(made.manifest.model_copy(update={"files": {**made.manifest.files, path: file}}))
    sha256 = hashlib.sha256(data).hexdigest()
    place = shop / "site" / manifest_name(sha256)
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(zlib.compress(data))
    index = json.loads((shop / "site" / INDEX).read_text())
    index.pop("seal")
    artifact = index["channels"]["stable"][-1]["artifacts"][0]
    artifact |= {"sha256": sha256, "bytes": announced or artifact["bytes"] + file.bytes}
    (shop / "site" / INDEX).write_bytes(to_sealed_json(SiteIndex.model_validate_json(json.dumps(index))))


def _parts(shop: Path) -> list[str]:
    folder = shop / "app" / VERSIONS
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def test_sizes_are_compared_before_anything_is_hashed(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _forge(shop, "1", FileFact(bytes=1 << 50, sha256="0" * 64), announced=1000)
    monkeypatch.setattr(fetching, "is_whole", lambda piece: pytest.fail("a chunk was hashed"))
    with pytest.raises(DamagedArtifact, match=r"lists files of 1,125,\S+ bytes, the index says 1,000; tell its publ"):
        _pull(shop)
    assert _parts(shop) == []
    _forge(shop, "2", FileFact(bytes=1 << 50, sha256="0" * 64), announced=None)
    with pytest.raises(OutOfSpace, match=r"1,125,\S+ bytes are needed"):
        _pull(shop)
    assert _parts(shop) == []


def test_a_manifest_cannot_lead_outside(shop: Path) -> None:
    _forge(shop, "1", FileFact(bytes=0, sha256=hashlib.sha256().hexdigest()), announced=None, path="../../../evil.txt")
    with pytest.raises(DamagedArtifact, match="cannot be a file of an artifact"):
        _pull(shop)
    assert not (shop / "evil.txt").exists()


def test_failing_pulls_leave_one_unfinished_artifact(shop: Path) -> None:
    for number in range(3):
        made = make_artifact(shop / f"{number}", seed=number)
        publish([made.folder], shop / "site", release=f"{number}")
        for path in (shop / "site" / "files").glob("*/*"):
            if path.suffix != ".z":
                path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(DamagedArtifact):
            _pull(shop)
        assert _parts(shop) == [f".{made.sha256}.part"]


@pytest.mark.slow
def test_many_chunks_of_one_byte_end(shop: Path) -> None:
    data = os.urandom(1 << 16)
    chunks = tuple(
        FileChunk(bytes=1, sha256=hashlib.sha256(data[place : place + 1]).hexdigest()) for place in range(len(data))
    )
    sha256 = hashlib.sha256(data).hexdigest()
    _forge(shop, "1", FileFact(bytes=len(data), sha256=sha256, chunks=chunks), announced=None)
    place = shop / "site" / "files" / sha256[:2] / sha256
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(data)
    _pull(shop)
    assert (shop / "app" / "large.bin").exists() or list((shop / "app" / VERSIONS).glob("*/large.bin"))


class _Slow:
    """A connection that never sends a byte until the pull is given up."""

    sends_ranges = True

    def __init__(self) -> None:
        self.released = threading.Event()

    def read(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        assert self.released.wait(60)
        yield from ()

    def close(self) -> None:
        pass


def test_a_fetch_takes_a_time_in_proportion_to_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, now = _Slow(), iter(range(0, 1 << 20, 100))
    monkeypatch.setattr(Site, "connect", lambda self: slow)
    (tmp_path / "file").write_bytes(bytes(1000))
    piece = fetching.PlacedChunk(tmp_path / "file", "0" * 64, 0, 1000, "0" * 64)
    limits = FetchLimits(clock=lambda: float(next(now)))
    try:
        with pytest.raises(TransferFailed, match=r"0 of 1,000 bytes in 400 s, slower than 1,024 bytes/s; pull again"):
            fetching.fetch(Site("https://models.example"), [piece], limits, lambda *_: None)
    finally:
        slow.released.set()


@contextmanager
def _dripping(piece: bytes) -> Iterator[Connection]:
    """A server that sends `piece` again and again, as long as anyone listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                try:
                    while True:
                        client.sendall(piece)
                        threading.Event().wait(0.01)
                except OSError:
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield Site(f"http://127.0.0.1:{server.getsockname()[1]}", allow=("http",), timeout_s=0.2).connect()
        thread.join()


@pytest.mark.parametrize("piece", [b"HTTP/1.1 100 Continue\r\n\r\n", b"H"], ids=["continue", "drip"])
def test_headers_have_a_deadline(piece: bytes) -> None:
    with _dripping(piece) as connection, pytest.raises(TransferFailed, match="the server stalled; check the URL"):
        connection.read_whole(INDEX, 1000)


@pytest.mark.parametrize("url", ["https://[::1/", "https://models.example:99999/", "https://models.example:x/"])
def test_what_is_no_url_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(InvalidInput, match=r"is no URL: .*; check its host and port"):
        pull(url, tmp_path)
    with pytest.raises(InvalidInput, match="is no URL"):
        pull("https://models.example/", tmp_path, proxy=url.replace("https", "http"), device=device_profile(tmp_path))
