"""Sites and commands that are used at once: nothing is lost, and a killed process blocks nobody."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_artifacts import make_artifact
from pairs_of_commands import Pairs, pairs

from edgekit.apps.delivery import publish, withdraw
from edgekit.apps.delivery.publish import read_site
from edgekit.errors import InvalidInput, UnknownName

Change = Callable[[Callable[[float, float, str], None]], object]


def _publish(site: Path, artifact: Path, release: str) -> Change:
    return lambda progress: publish([artifact], site, release=release, progress=progress)


def _at_once(first: Change, second: Change) -> list[str]:
    """Start `second` while `first` is copying; return what `second` waited for."""
    copying, waits_or_done = threading.Event(), threading.Event()
    waited: list[str] = []

    def pause(done: float, total: float, what: str) -> None:
        copying.set()
        assert waits_or_done.wait(60)

    def notice(done: float, total: float, what: str) -> None:
        if what.startswith("waiting"):
            waited.append(what)
            waits_or_done.set()

    def run_second() -> None:
        try:
            second(notice)
        finally:
            waits_or_done.set()

    threads = [threading.Thread(target=first, args=(pause,)), threading.Thread(target=run_second)]
    threads[0].start()
    assert copying.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return waited


def test_two_publishes_at_once_keep_both_releases(tmp_path: Path) -> None:
    site, artifact = tmp_path / "site", make_artifact(tmp_path / "artifact")
    waited = _at_once(_publish(site, artifact, "1"), _publish(site, artifact, "2"))
    index = read_site(site)
    assert (index.sequence, index.releases) == (2, 2)
    assert [(each.name, each.number) for each in index.channel("stable")] == [("1", 1), ("2", 2)]
    assert waited == [f"waiting for process {os.getpid()}, which changes {site}"]
    assert sorted(path.name for path in site.iterdir()) == ["files", "index.json"]


def _publish_without_end(site: Path, artifact: Path, begun: Path) -> None:
    def pause(done: float, total: float, what: str) -> None:
        begun.touch()
        time.sleep(600)

    publish([artifact], site, release="1", progress=pause)


def test_a_killed_publish_blocks_nobody(tmp_path: Path) -> None:
    site, artifact, begun = tmp_path / "site", make_artifact(tmp_path / "artifact"), tmp_path / "begun"
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_publish_without_end, args=(site, artifact, begun), daemon=True)
    process.start()
    while not begun.exists():
        time.sleep(0.01)

    def kill(done: float, total: float, what: str) -> None:
        if what.startswith("waiting"):
            assert process.pid is not None and f"process {process.pid}," in what
            os.kill(process.pid, signal.SIGKILL)
            process.join(60)

    assert publish([artifact], site, release="2", progress=kill).sequence == 1
    assert process.exitcode == -signal.SIGKILL
    assert not (site / ".lock").exists()


def test_a_wrong_name_leaves_no_site_behind(tmp_path: Path) -> None:
    site = tmp_path / "site"
    with pytest.raises(UnknownName, match="unknown channel 'stable'"):
        withdraw(site, release="1")
    with pytest.raises(UnknownName, match="unknown release '1'"):
        publish([], site, release="1", rollout=0.5)
    with pytest.raises(InvalidInput):
        publish([tmp_path / "none"], site, release="1")
    assert not site.exists()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> object:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        yield Pairs(tmp_path_factory.mktemp("pairs") / "shared", patch)


@pytest.mark.onnx
@pytest.mark.quantize
@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), pairs())
def test_two_commands_at_once_lose_nothing(made: Pairs, first: str, second: str) -> None:
    made.run(first, second)
