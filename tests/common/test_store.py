"""The content store makes each folder once, despite crashes and concurrent processes."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgekit.common.content_store import ContentStore, Hold
from edgekit.contracts.neutral import weights_store
from edgekit.errors import DamagedArtifact, InvalidInput

KEY = "ab" * 32


def fine(folder: Path) -> None:
    if not (folder / "whole").exists():
        raise DamagedArtifact(f"{folder}: not whole")


def make(folder: Path) -> None:
    (folder / "whole").write_text("yes")


def refuse(folder: Path) -> None:
    raise AssertionError("it was there already")


def test_refusal_before_any_work_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        ContentStore(tmp_path).get(KEY, refuse, fine)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    assert store.root == tmp_path
    made = store.get(KEY, make, fine)
    assert store.get(KEY, refuse, fine) == made == tmp_path / KEY
    assert not [path for path in store.root.iterdir() if path != made], "no lock and nothing half-made is left"


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)

    def stop_half_way(folder: Path) -> None:
        (folder / "half").write_text("done")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.get(KEY, stop_half_way, fine)
    assert not (tmp_path / KEY).exists()

    def go_on(folder: Path) -> None:
        assert (folder / "half").read_text() == "done"
        make(folder)

    assert (store.get(KEY, go_on, fine) / "half").exists()


def test_a_damaged_folder_is_made_again(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    made = store.get(KEY, make, fine)
    (made / "whole").unlink()
    assert (store.get(KEY, make, fine) / "whole").exists()


def test_a_store_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidInput, match="--store"):
        ContentStore(tmp_path / "file").get(KEY, make, fine)


def _make_slowly(root: Path, log: Path) -> None:
    def work(folder: Path) -> None:
        with log.open("a") as file:
            file.write("made\n")
        time.sleep(0.3)
        make(folder)

    ContentStore(root).get(KEY, work, fine)


def test_eight_processes_at_once_make_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
    started = [context.Process(target=_make_slowly, args=(tmp_path, tmp_path / "log")) for _ in range(8)]
    for process in started:
        process.start()
    for process in started:
        process.join(30)
        assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == "made\n"


def _make_without_end(root: Path, begun: Path) -> None:
    def work(folder: Path) -> None:
        (folder / "half").write_text("done")
        begun.write_text("yes")
        time.sleep(60)

    ContentStore(root).get(KEY, work, fine)


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    process = multiprocessing.get_context("fork").Process(target=_make_without_end, args=(tmp_path, begun))
    process.start()
    while not begun.exists():
        time.sleep(0.01)
    waited: list[str] = []

    def kill_holder(holder: str) -> None:
        waited.append(holder)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join(10)

    made = ContentStore(tmp_path).get(KEY, make, fine, waiting=kill_holder)
    assert (made / "half").exists(), "what the killed one had done is kept"
    assert f"process {process.pid}" in waited[0]


def _keys(store: ContentStore) -> set[str]:
    return {path.name for path in store.root.iterdir()}


def _sized(size: int) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        (folder / "whole").write_bytes(bytes(size))

    return work


def _age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_least_recently_used_folders_are_dropped_first(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    keys = [f"{number:064x}" for number in range(4)]
    for age, key in enumerate(reversed(keys)):
        _age(store.get(key, _sized(100), fine), 1000 * (age + 1))
    store.get(keys[0], refuse, fine)  # the oldest is used again, so it is the newest
    store.keep_within(200, spare="")
    assert _keys(store) == {keys[0], keys[3]}
    store.keep_within(0, spare=keys[3])
    assert _keys(store) == {keys[3]}, "what is asked for next is spared"


def test_a_new_folder_drops_the_least_recently_used_ones_beyond_the_limit_but_none_in_use(tmp_path: Path) -> None:
    store = ContentStore(tmp_path, limit_bytes=300)
    keys = [f"{number:064x}" for number in range(5)]
    for age, key in enumerate(keys[:3]):
        _age(store.get(key, _sized(100), fine), 1000 * (3 - age))
    hold = Hold.of(tmp_path / keys[0])
    assert hold is not None
    store.get(keys[3], _sized(100), fine)
    assert _keys(store) == {keys[0], keys[2], keys[3]}, "the oldest is in use"
    hold.close()
    store.get(keys[2], refuse, fine)
    assert _keys(store) == {keys[0], keys[2], keys[3]}, "one that is found drops none"
    store.get(keys[4], _sized(400), fine)
    assert _keys(store) == {keys[4]}, "the newest stays, whatever it takes"


def test_the_stores_of_the_cache_are_bounded_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGEKIT_STORE", "1KiB")
    for own in (None, tmp_path / "own"):
        store = weights_store(own)
        for number in range(3):
            _age(store.get(f"{number:064x}", _sized(500), fine), 100 - number)
        assert len(_keys(store)) == (3 if own else 2), "a store that a command names has no limit"
    monkeypatch.setenv("EDGEKIT_STORE", "much")
    with pytest.raises(InvalidInput, match="EDGEKIT_STORE: 'much' is not a size; write it as "):
        weights_store()


def test_partial_folders_are_dropped_unless_another_process_makes_them(tmp_path: Path) -> None:
    store = ContentStore(tmp_path / "store")
    half, made = "1" * 64, "2" * 64
    store.root.mkdir(parents=True)
    for name in (f".{half}.part", f".{KEY}.part", f".{made}.gone"):
        (store.root / name).mkdir()
        (store.root / name / "bytes").write_bytes(bytes(100))
    with (store.root / f".{KEY}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another holder: locks belong to the opened file, not to the process
        store.keep_within(0, spare="")
        assert _keys(store) == {f".{KEY}.part", f".{KEY}.lock"}
    store.keep_within(0, spare="")
    assert _keys(store) == set()


def test_a_crash_while_dropping_leaves_the_folder_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ContentStore(tmp_path)
    store.get(KEY, _sized(100), fine)
    with monkeypatch.context() as broken:

        def die(*_: object, **__: object) -> None:
            if not (tmp_path / KEY).exists():
                raise KeyboardInterrupt  # after the rename, before a byte is removed

        broken.setattr("shutil.rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            store.keep_within(0, spare="")
    assert _keys(store) == {f".{KEY}.gone"}
    assert (store.get(KEY, make, fine) / "whole").exists()
    assert _keys(store) == {KEY}, "the next process that makes it removes what was left"


def test_a_folder_that_is_open_stays_readable_when_it_is_dropped(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    with (store.get(KEY, _sized(100), fine) / "whole").open("rb") as file:
        store.keep_within(0, spare="")
        assert not (tmp_path / KEY).exists()
        assert file.read() == bytes(100)
