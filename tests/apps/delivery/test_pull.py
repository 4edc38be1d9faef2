"""Publishing and pulling: what is fetched, chosen, kept and refused."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_artifacts import install
from published import TENSOR_BYTES, device_profile, make_artifact
from site_server import Asked, Fault, SiteServer, site_server

import edgekit
from edgekit.apps.delivery import (
    NetworkMetered,
    Pulled,
    RollbackRefused,
    TransferFailed,
    fetching,
    prune,
    publish,
    pull,
    rollback,
    withdraw,
)
from edgekit.apps.delivery.fetching import PlacedChunk, is_whole, pieces_of
from edgekit.apps.delivery.installation import manifests_in, staging_of
from edgekit.apps.delivery.site_index import INDEX, SiteIndex, file_name, manifest_name
from edgekit.artifact.artifact import read_manifest, verify
from edgekit.cli import command
from edgekit.common.sealed_json import read_sealed_json, to_sealed_json
from edgekit.contracts.installed import VERSIONS, folder_of, read_installed
from edgekit.contracts.manifest import MANIFEST
from edgekit.errors import DamagedArtifact, InvalidInput, OutOfSpace
from edgekit.formats import chunking


class Shop:
    """A site with its server, a device, and a folder for an installation."""

    def __init__(self, folder: Path, server: SiteServer) -> None:
        self.folder, self.server, self.site, self.app = folder, server, folder / "site", folder / "app"
        self.device = device_profile(folder)

    def publish(self, release: str, changed: tuple[int, ...] = (), **options: object) -> str:
        made = make_artifact(self.folder / f"artifact-{release}", changed, seed=len(changed))
        publish([made.folder], self.site, release=release, **options)  # type: ignore[arg-type]
        return made.sha256

    def pull(self, **options: object) -> Pulled:
        given = {"device": self.device, "allow": ("http",), "timeout_s": 2.0, **options}
        return pull(self.server.url, self.app, **given)  # type: ignore[arg-type]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    install(tmp_path / "target", monkeypatch)
    monkeypatch.setattr(fetching, "_FIRST_WAIT_S", 0.01)
    with site_server(tmp_path / "site") as server:
        yield Shop(tmp_path, server)


def test_a_pulled_artifact_opens_and_answers(shop: Shop) -> None:
    sha256 = shop.publish("1.0")
    pulled = shop.pull()
    assert (pulled.sha256, pulled.release, pulled.is_new) == (sha256, "1.0", True)
    assert verify(shop.app).sha256 == sha256
    with edgekit.open(shop.app) as runtime:
        assert runtime.generate("a", max_tokens=3).tokens
    again = shop.pull()
    assert (again.is_new, again.fetched_bytes) == (False, 0)


def test_only_the_chunks_of_a_changed_tensor_are_fetched(shop: Shop) -> None:
    shop.publish("1.0")
    shop.pull()
    shop.publish("1.1", changed=(5,))
    shop.server.asked.clear()
    pulled = shop.pull()
    manifest_bytes = (shop.site / manifest_name(pulled.sha256)).stat().st_size
    assert manifest_bytes < (pulled.folder / MANIFEST).stat().st_size
    assert TENSOR_BYTES[5] <= pulled.fetched_bytes < 1.1 * TENSOR_BYTES[5]
    assert shop.server.file_bytes == pulled.fetched_bytes + manifest_bytes
    verify(shop.app)


def test_chunks_of_an_artifact_elsewhere_are_reused(shop: Shop) -> None:
    shop.publish("1.0")
    pulled = shop.pull(reuse=[shop.folder / "artifact-1.0"])
    assert pulled.fetched_bytes == 0
    verify(shop.app)


def test_bytes_that_another_version_cut_otherwise_are_reused(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as former:
        former.setattr(chunking, "_TENSORS", chunking._Grain(1 << 10, 1 << 13, (1 << 12) - 1))
        shop.publish("1.0")
    pulled = shop.pull()
    cuts = {chunk.sha256 for fact in read_manifest(pulled.folder).manifest.files.values() for chunk in fact.parts}
    shop.publish("1.1", changed=(5,))
    again = shop.pull()
    new = read_manifest(again.folder).manifest.files["model.safetensors"].parts
    assert sum(chunk.bytes for chunk in new if chunk.sha256 not in cuts) > 2 * TENSOR_BYTES[5]
    assert TENSOR_BYTES[5] <= again.fetched_bytes < 1.1 * TENSOR_BYTES[5]
    verify(shop.app)


def test_bytes_that_changed_on_the_disk_are_fetched_instead(shop: Shop) -> None:
    shop.publish("1.0")
    pulled = shop.pull()
    shop.publish("1.1", changed=(0,))
    weights = pulled.folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    again = shop.pull()
    assert again.fetched_bytes > TENSOR_BYTES[0] + 10_000
    verify(shop.app)


def test_file_url_needs_permission_and_reports_progress(shop: Shop) -> None:
    sha256 = shop.publish("1.0")
    told: list[tuple[float, float, str]] = []
    pulled = pull(
        shop.site.as_uri(), shop.app, device=shop.device, allow=("file",), progress=lambda *step: told.append(step)
    )
    assert (pulled.sha256, shop.server.paths) == (sha256, [])
    assert {"looking for chunks on the disk", "fetching"} <= {what for _, _, what in told}
    assert all(0 <= done <= total for done, total, _ in told)
    verify(shop.app)
    (shop.site / file_name(pulled_files(pulled)[0])).unlink()
    with pytest.raises(TransferFailed, match="No such file"):
        pull(shop.site.as_uri(), shop.folder / "other", device=shop.device, allow=("file",))


def pulled_files(pulled: Pulled) -> list[str]:
    """Return the file hashes of a pulled artifact."""
    return [fact.sha256 for fact in read_manifest(pulled.folder).manifest.files.values() if fact.bytes]


def test_rollback_returns_to_the_former_artifact_and_stays_there(shop: Shop) -> None:
    first, second = shop.publish("1.0"), None
    shop.pull()
    second = shop.publish("1.1", changed=(1,))
    shop.pull()
    assert rollback(shop.app).sha256 == first
    assert read_manifest(shop.app).sha256 == first
    again = shop.pull()
    assert (again.sha256, again.release, again.skipped) == (first, "1.0", "1.1")  # not taken again by itself
    words = ["pull", shop.server.url, "-o", str(shop.app), "--device", shop.device, "--allow", "http"]
    assert "release 1.1 was rolled back here; 1.0 stays" in CliRunner().invoke(command, words).output
    third = shop.publish("1.2", changed=(2,))
    newest = shop.pull()
    assert (newest.sha256, newest.skipped) == (third, None)
    assert second != third


def test_a_withdrawn_release_is_left(shop: Shop) -> None:
    first = shop.publish("1.0")
    second = shop.publish("1.1", changed=(1,))
    assert shop.pull().sha256 == second
    withdraw(shop.site, release="1.1")
    assert shop.pull().sha256 == first


def test_former_artifacts_are_kept_or_removed(shop: Shop) -> None:
    hashes = []
    for place in range(3):
        hashes.append(shop.publish(f"1.{place}", changed=(place,)))
        shop.pull()
    assert {path.name for path in (shop.app / VERSIONS).iterdir()} == set(hashes[1:])
    assert prune(shop.app, 0) > sum(TENSOR_BYTES)
    assert [path.name for path in (shop.app / VERSIONS).iterdir()] == hashes[2:]
    with pytest.raises(InvalidInput, match="does not exist"):
        rollback(shop.app)
    assert read_manifest(shop.app).sha256 == hashes[2]


def test_a_staged_release_reaches_its_share_and_stays(tmp_path: Path) -> None:
    index = SiteIndex(
        sequence=2,
        releases=2,
        channels={
            "stable": (
                {"name": "1", "number": 1, "artifacts": ()},
                {"name": "2", "number": 2, "artifacts": (), "rollout": 0.3},
            )
        },
    )
    installations = [f"{place:064x}" for place in range(2000)]
    taken = [each for each in installations if index.newest_for("stable", each).name == "2"]
    assert 0.26 < len(taken) / 2000 < 0.34
    wider = index.channels["stable"][1].model_copy(update={"rollout": 0.6})
    assert all(wider.is_for(each) for each in taken)


def test_a_device_gets_its_first_suitable_artifact(shop: Shop) -> None:
    one, other = make_artifact(shop.folder / "one"), make_artifact(shop.folder / "other", changed=(0,))
    publish([one.folder], shop.site, release="1", devices=["pixel-*"])
    with pytest.raises(InvalidInput, match=r"nothing for test-device: .* is for pixel-\*"):
        shop.pull()
    publish([other.folder], shop.site, release="1")
    assert shop.pull().sha256 == other.sha256
    pixel = device_profile(shop.folder, "pixel-1")
    assert pull(shop.server.url, shop.folder / "b", device=pixel, allow=("http",)).sha256 == one.sha256


def test_channels_are_independent(shop: Shop) -> None:
    stable = shop.publish("1.0")
    beta = shop.publish("2.0", changed=(0,), channel="beta")
    assert shop.pull(channel="beta").sha256 == beta
    assert shop.pull().sha256 == stable
    with pytest.raises(InvalidInput, match="unknown channel 'nightly'"):
        shop.pull(channel="nightly")


def test_an_older_index_offered_as_new_is_refused(shop: Shop) -> None:
    shop.publish("1.0")
    old = (shop.site / INDEX).read_bytes()
    newest = shop.publish("1.1", changed=(1,))
    shop.pull()
    (shop.site / INDEX).write_bytes(old)
    with pytest.raises(RollbackRefused, match="this index is older than one seen before"):
        shop.pull()
    assert read_manifest(shop.app).sha256 == newest
    index = read_sealed_json(old, SiteIndex, "index", versions=1, sealed_since=1, fix="")[0]
    (shop.site / INDEX).write_bytes(to_sealed_json(index.model_copy(update={"sequence": 9})))
    with pytest.raises(RollbackRefused, match=r"offers release 1\.0, older than 1\.1"):
        shop.pull()


def test_a_metered_network_fetches_no_chunks(shop: Shop) -> None:
    shop.publish("1.0")
    with pytest.raises(NetworkMetered) as refused:
        shop.pull(is_metered=lambda: True)
    assert refused.value.missing_bytes > sum(TENSOR_BYTES)
    answers = iter([False] * 5 + [True] * 100)
    with pytest.raises(NetworkMetered):  # it becomes metered on the way
        shop.pull(is_metered=lambda: next(answers), connections=1)
    shop.pull()


# Misbehaving servers


def _first(fault: Fault) -> object:
    """Answer the first request for a large file with `fault`, all others correctly."""
    given = threading.Event()

    def choose(number: int, asked: Asked) -> Fault | None:
        if asked.stop - asked.start > 200_000 and not given.is_set():
            given.set()
            return fault
        return None

    return choose


@pytest.mark.parametrize(
    "fault",
    [
        Fault(send=100_000),
        Fault(announced=10_000_000, send=50_000),
        Fault(announced=100),
        Fault(change=lambda data: bytes(len(data))),
        Fault(change=lambda data: data + b"more", announced=None),
        Fault(status=503, headers={"Retry-After": "0"}),
        Fault(status=429),
        Fault(headers={"Content-Range": "bytes 0-9/10"}),
        Fault(headers={"Content-Encoding": "gzip"}),
        Fault(send=70_000, stall_s=30),
    ],
    ids=["cut", "too long", "too short", "other bytes", "more", "503", "429", "other range", "encoded", "stalled"],
)
def test_one_server_fault_costs_a_retry(shop: Shop, fault: Fault) -> None:
    shop.publish("1.0")
    shop.server.fault = _first(fault)  # type: ignore[assignment]
    shop.pull(timeout_s=0.5)
    verify(shop.app)


def test_a_file_deleted_during_a_pull_keeps_fetched_chunks(shop: Shop) -> None:
    shop.publish("1.0")
    shop.server.fault = lambda number, asked: Fault(status=404) if number > 3 else None
    with pytest.raises(TransferFailed, match="the server answered 404"):
        shop.pull(connections=1)
    assert not read_installed(shop.app) or read_installed(shop.app).current is None  # type: ignore[union-attr]
    shop.server.fault = lambda number, asked: None
    shop.server.asked.clear()
    shop.pull()
    assert shop.server.file_bytes < sum(TENSOR_BYTES) + 100_000


def test_a_server_that_states_no_length_is_named(shop: Shop) -> None:
    shop.publish("1.0")
    shop.server.fault = lambda number, asked: Fault(headers={"Content-Length": "unknown"})
    with pytest.raises(TransferFailed, match="states no length; serve files as they are"):
        shop.pull()


def test_pruning_a_folder_without_an_installation_does_not_create_it(tmp_path: Path) -> None:
    assert prune(tmp_path / "absent") == 0
    assert not (tmp_path / "absent").exists()


def test_repeatedly_wrong_bytes_are_refused(shop: Shop) -> None:
    shop.publish("1.0")
    zeros = Fault(change=lambda data: bytes(len(data)))
    shop.server.fault = lambda number, asked: zeros
    with pytest.raises(DamagedArtifact, match="cannot be decompressed"):  # the manifest
        shop.pull()
    shop.server.fault = lambda number, asked: None if asked.name.endswith(".z") else zeros
    with pytest.raises(DamagedArtifact, match="are not those that the manifest lists"):
        shop.pull()


@pytest.mark.parametrize(
    "target",
    [
        "https://elsewhere.example/x", "//elsewhere.example/x", "http://127.0.0.1/",
        "http://[::1/", "http://127.0.0.1:99999/", "http://x\x1b[31m/",
    ],
)  # fmt: skip
def test_a_redirect_elsewhere_is_refused(shop: Shop, target: str) -> None:
    shop.publish("1.0")
    shop.server.fault = lambda number, asked: Fault(status=302, headers={"Location": target})
    with pytest.raises(TransferFailed, match="nothing else is asked") as refused:
        shop.pull()
    assert "\x1b" not in str(refused.value)


def test_a_redirect_inside_the_site_is_followed(shop: Shop) -> None:
    sha256 = shop.publish("1.0")
    moved = shop.site / "moved"
    (shop.site / manifest_name(sha256)).rename(moved)
    real = SiteServer.answer

    def answer(server: SiteServer, handler: object) -> None:
        if handler.path.endswith(f"{sha256}.z"):  # type: ignore[attr-defined]
            handler.send_response(301)  # type: ignore[attr-defined]
            handler.send_header("Location", "/moved")  # type: ignore[attr-defined]
            handler.send_header("Content-Length", "0")  # type: ignore[attr-defined]
            handler.end_headers()  # type: ignore[attr-defined]
        else:
            real(server, handler)  # type: ignore[arg-type]

    shop.server.answer = answer.__get__(shop.server)  # type: ignore[method-assign]
    assert shop.pull().sha256 == sha256


def test_a_server_without_ranges_is_read_once(shop: Shop) -> None:
    shop.publish("1.0")
    shop.server.sends_ranges = False
    shop.pull(connections=1)
    verify(shop.app)
    assert shop.server.file_bytes < 2.2 * sum(TENSOR_BYTES)


def test_a_full_disk_is_reported_before_and_during_a_pull(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.publish("1.0")
    with monkeypatch.context() as patch:
        patch.setattr(fetching, "free_bytes", lambda path: 1000)
        with pytest.raises(OutOfSpace):
            shop.pull()
    script = (
        "import resource, sys; from edgekit.apps.delivery import pull; from edgekit.errors import OutOfSpace\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try: pull(sys.argv[1], sys.argv[2], device=sys.argv[3], allow=('http',))\n"
        "except OutOfSpace as error: print(error)\n"
    )
    command = [sys.executable, "-c", script, shop.server.url, str(shop.app), shop.device]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "bytes are needed" in ran.stdout
    shop.pull()
    verify(shop.app)


def test_two_pulls_at_once_fetch_it_once(shop: Shop) -> None:
    sha256 = shop.publish("1.0")
    shop.server.throttle_s = 0.005
    results: list[Pulled] = []
    threads = [threading.Thread(target=lambda: results.append(shop.pull())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.is_new for each in results) == [False, True]
    assert {each.sha256 for each in results} == {sha256}
    assert shop.server.file_bytes < 1.1 * sum(TENSOR_BYTES) + 200_000


def test_only_the_given_url_is_contacted(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    asked = []
    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda to, *a, **b: asked.append(to) or connect(to, *a, **b))
    shop.publish("1.0")
    shop.pull()
    assert set(asked) == {("127.0.0.1", shop.server.server.server_port)}


def test_a_proxy_carries_every_request(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.publish("1.0")
    place = shop.server.url.removeprefix("http://").rstrip("/")
    real = SiteServer.answer

    def answer(server: SiteServer, handler: object) -> None:
        assert handler.path.startswith("http://models.example/")  # type: ignore[attr-defined]
        handler.path = handler.path.removeprefix("http://models.example")  # type: ignore[attr-defined]
        real(server, handler)  # type: ignore[arg-type]

    shop.server.answer = answer.__get__(shop.server)  # type: ignore[method-assign]
    monkeypatch.setenv("http_proxy", f"http://{place}")
    monkeypatch.delenv("no_proxy", raising=False)
    pull("http://models.example/", shop.app, device=shop.device, allow=("http",))
    verify(shop.app)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://models.example", "is not encrypted; allow it with --allow http"),
        ("file:///tmp", "is a folder of this machine; allow it with --allow file"),
        ("ftp://models.example", "begins with https://"),
        ("https://models.example/?token=x", "has no user, query or fragment"),
        ("https://", "names no host"),
    ],
)
def test_urls_that_are_refused(tmp_path: Path, url: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason.replace("?", r"\?")):
        pull(url, tmp_path)


def test_a_closed_port_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_FIRST_WAIT_S", 0.001)
    with pytest.raises(TransferFailed, match=r"index\.json: Connection refused; check the URL and the network"):
        pull("http://127.0.0.1:1", tmp_path, allow=("http",))


PULL = """
import sys
from edgekit.apps.delivery import pull
print("began", flush=True)
pull(sys.argv[1], sys.argv[2], device=sys.argv[3], allow=("http",))
"""


def chunks_of(app: Path, sha256: str) -> tuple[list[PlacedChunk], set[PlacedChunk]]:
    """The chunks of an unfinished pull that are complete, and those that have some of their bytes."""
    staging = staging_of(app, sha256)
    whole, begun = [], set()
    manifests = [manifest for path, manifest in manifests_in(app) if path == staging]
    for piece in (piece for manifest in manifests for piece in pieces_of(staging, manifest)):
        if is_whole(piece):
            whole.append(piece)
        elif piece.path.exists():
            with piece.path.open("rb") as file:
                file.seek(piece.offset)
                if any(file.read(piece.bytes)):
                    begun.add(piece)
    return whole, begun


def seconds_of_a_pull(shop: Shop, killed_after_s: float, *, in_transfer: bool) -> float | None:
    """The seconds of a pull in a separate process; None if it was killed before its end.

    `killed_after_s` counts from the first chunk that is asked for where it is killed `in_transfer`.
    """
    command = [sys.executable, "-c", PULL, shop.server.url, str(shop.app), shop.device]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"began\n"
    while in_transfer and not shop.server.asked and process.poll() is None:
        time.sleep(0.005)
    began = time.monotonic()
    try:
        _, errors = process.communicate(timeout=killed_after_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    assert process.returncode == 0, errors.decode()
    return time.monotonic() - began


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.long)])
def test_kills_at_random_moments_lose_nothing(shop: Shop, kills: int) -> None:
    old = shop.publish("1.0")
    shop.pull()
    before = shutil.copytree(shop.app, shop.folder / "before")
    new = shop.publish("1.1", changed=(0, 2, 4, 5, 7))
    shop.server.throttle_s = 0.02
    chance, longest_s = random.Random(kills), 0.5
    killed = in_transfers = most_begun = 0
    while killed < kills:
        whole, begun = chunks_of(shop.app, new)
        shop.server.asked.clear()
        in_transfer = chance.random() < 0.8  # else from the beginning: at the index, the manifest, the hashing
        took_s = seconds_of_a_pull(shop, chance.uniform(0, longest_s), in_transfer=in_transfer)
        installed = read_installed(shop.app)
        assert installed is not None and installed.current is not None
        assert verify(shop.app).sha256 == installed.current.sha256  # every byte
        for piece, asked in product(whole, shop.server.asked):
            if asked.name == file_name(piece.file_sha256):  # nothing complete is asked for again
                assert asked.stop <= piece.offset or asked.start >= piece.offset + piece.bytes, (asked, piece)
        if took_s is None:
            assert installed.current.sha256 in (old, new)
            killed += 1
            in_transfers += bool(shop.server.asked)
            most_begun = max(most_begun, len(chunks_of(shop.app, new)[1] - begun))
        else:
            assert installed.current.sha256 == new
            longest_s = max(0.05, took_s * 1.2)
            shutil.rmtree(shop.app)
            shutil.copytree(before, shop.app)
    shop.pull()
    assert verify(shop.app).sha256 == new
    assert in_transfers >= kills // 2
    assert 1 <= most_begun <= 4, "each of the four connections begins at most one chunk"


def test_a_switch_that_dies_leaves_the_old_or_the_new(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shop.publish("1.0")
    shop.pull()
    second = shop.publish("1.1", changed=(1,))
    real = Path.rename

    def dies(path: Path, target: Path) -> Path:
        moved = real(path, target)
        if VERSIONS in str(target):
            raise KeyboardInterrupt
        return moved

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dies)
        with pytest.raises(KeyboardInterrupt):
            shop.pull()
    assert verify(shop.app).sha256 == first
    pulled = shop.pull()
    assert (pulled.sha256, pulled.fetched_bytes) == (second, 0)
    installed = read_installed(shop.app)
    assert installed is not None and installed.former is not None
    assert verify(folder_of(shop.app, installed.former)).sha256 == first
