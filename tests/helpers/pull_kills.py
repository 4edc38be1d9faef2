"""Kills `pull` with SIGKILL at random moments of a transfer, and checks what is left after each.

python tests/helpers/pull_kills.py --count 100
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from published import device_profile, make_artifact
from site_server import SiteServer, site_server

from edgekit.apps.delivery import publish, pull
from edgekit.apps.delivery.fetching import PlacedChunk, is_whole, pieces_of
from edgekit.apps.delivery.installation import manifests_in, staging_of
from edgekit.apps.delivery.site_index import file_name
from edgekit.artifact.artifact import verify
from edgekit.contracts.installed import read_installed

CONNECTIONS = 4
_SCRIPT = """
import sys
from edgekit.apps.delivery import pull
print("began", flush=True)
pull(sys.argv[1], sys.argv[2], device=sys.argv[3], allow=("http",))
"""


class KillReport:
    """The results of all runs."""

    def __init__(self) -> None:
        self.kills = self.kills_in_transfer = self.finished = 0
        self.most_begun = 0  # chunks that one killed pull left with some of their bytes


def kill_pulls(folder: Path, count: int, seed: int = 0) -> KillReport:
    """Kill `count` pulls of an update; raise AssertionError where anything was lost."""
    chance, report = random.Random(seed), KillReport()
    device = device_profile(folder)
    old, new = make_artifact(folder / "old"), make_artifact(folder / "new", changed=(0, 2, 4, 5, 7), seed=1)
    publish([old.folder], folder / "site", release="1")
    before, app = folder / "before", folder / "app"
    with site_server(folder / "site") as server:
        pull(server.url, before, device=device, allow=("http",))
        publish([new.folder], folder / "site", release="2")
        server.throttle_s = 0.02
        longest_s = 0.5
        while report.kills < count:
            shutil.rmtree(app, ignore_errors=True)
            shutil.copytree(before, app)
            finished = False
            while not finished and report.kills < count:
                whole, begun = _whole_pieces(app, new.sha256), _begun_pieces(app, new.sha256)
                server.asked.clear()
                in_transfer = chance.random() < 0.8  # else from the beginning: at the index, the manifest, the hashing
                finished, took_s = _run(server, app, device, chance.uniform(0, longest_s), in_transfer)
                if finished:
                    longest_s = max(0.05, took_s * 1.2)
                    report.finished += 1
                else:
                    report.kills += 1
                    report.kills_in_transfer += bool(server.asked)
                    left = _begun_pieces(app, new.sha256) - begun
                    report.most_begun = max(report.most_begun, len(left))
                _check(app, old.sha256, new.sha256, must_be_new=finished)
                _check_nothing_again(server, whole)
            if not finished:
                pull(server.url, app, device=device, allow=("http",))
                _check(app, old.sha256, new.sha256, must_be_new=True)
    return report


def _run(server: SiteServer, app: Path, device: str, after_s: float, in_transfer: bool) -> tuple[bool, float]:
    """Run a pull in a process of its own and kill it; return True if it finished first, and its seconds.

    The time counts from the first chunk that was asked for where `in_transfer`.
    """
    command = [sys.executable, "-c", _SCRIPT, server.url, str(app), device]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"began\n"
    while in_transfer and not server.asked and process.poll() is None:
        time.sleep(0.005)
    began = time.monotonic()
    try:
        _, errors = process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return False, after_s
    assert process.returncode == 0, errors.decode()
    return True, time.monotonic() - began


def _whole_pieces(app: Path, sha256: str) -> list[PlacedChunk]:
    staging = staging_of(app, sha256)
    manifests = [manifest for path, manifest in manifests_in(app) if path == staging]
    return [piece for manifest in manifests for piece in pieces_of(staging, manifest) if is_whole(piece)]


def _begun_pieces(app: Path, sha256: str) -> set[PlacedChunk]:
    """The chunks that have some of their bytes."""
    staging = staging_of(app, sha256)
    manifests = [manifest for path, manifest in manifests_in(app) if path == staging]
    begun = set()
    for piece in (piece for manifest in manifests for piece in pieces_of(staging, manifest)):
        if piece.path.exists() and not is_whole(piece):
            with piece.path.open("rb") as file:
                file.seek(piece.offset)
                if any(file.read(piece.bytes)):
                    begun.add(piece)
    return begun


def _check(app: Path, old: str, new: str, *, must_be_new: bool) -> None:
    installed = read_installed(app)
    assert installed is not None and installed.current is not None
    assert verify(app).sha256 == installed.current.sha256  # every byte
    assert installed.current.sha256 == new if must_be_new else installed.current.sha256 in (old, new)


def _check_nothing_again(server: SiteServer, whole: list[PlacedChunk]) -> None:
    """Nothing that was complete on the disk is asked for again."""
    for piece in whole:
        for asked in server.asked:
            if asked.name == file_name(piece.file_sha256):
                assert asked.stop <= piece.offset or asked.start >= piece.offset + piece.bytes, (asked, piece)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        made = kill_pulls(Path(place), arguments.count, arguments.seed)
    print(f"{made.kills} kills, {made.kills_in_transfer} of them in a transfer, {made.finished} pulls finished")  # noqa: T201
