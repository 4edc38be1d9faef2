"""Threads leave busy cores to others, and spin briefly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from edgekit.enginekit.busy_cores import MOST_TOKENS, ThreadChoice
from edgekit.enginekit.spinning import BRIEFLY_US, LONG_US, runs_on_battery, spin_us
from edgekit.errors import InvalidInput


def seconds(threads: int, free_cores: int, work: float = 0.012) -> float:
    """A call on a machine with `free_cores`: threads that have no core of their own make all others wait."""
    return work / threads if threads <= free_cores else 5 * work / max(1, free_cores)


def run(choice: ThreadChoice, calls: int, time_of: Callable[[int], float], tokens: int = 1) -> list[int]:
    """Make calls and return the threads of each."""
    used = []
    for _ in range(calls):
        threads = choice.threads(tokens)
        choice.note(tokens, time_of(threads))
        used.append(threads)
    return used


def usual(used: list[int]) -> int:
    return Counter(used).most_common(1)[0][0]


@pytest.mark.parametrize(("most", "free"), [(2, 1), (4, 3), (4, 2), (8, 7), (8, 4), (8, 1)])
def test_a_busy_core_is_left_to_others(most: int, free: int) -> None:
    choice = ThreadChoice(most)
    run(choice, 100, lambda threads: seconds(threads, most))
    run(choice, 700, lambda threads: seconds(threads, free))
    used = run(choice, 300, lambda threads: seconds(threads, free))
    assert usual(used) == free
    assert sum(threads > free for threads in used) <= 9  # attempts with one more


@pytest.mark.parametrize("most", [2, 4, 8])
def test_all_threads_run_again_when_others_are_gone(most: int) -> None:
    choice = ThreadChoice(most)
    run(choice, 1000, lambda threads: seconds(threads, most // 2))
    assert usual(run(choice, 50, lambda threads: seconds(threads, most // 2))) == most // 2
    run(choice, 1500, lambda threads: seconds(threads, most))
    assert set(run(choice, 100, lambda threads: seconds(threads, most))) == {most}


def test_a_machine_that_is_busy_from_the_beginning_is_noticed() -> None:
    choice = ThreadChoice(2)
    assert usual(run(choice, 50, lambda threads: seconds(threads, 1))) == 1


def test_a_quiet_machine_pays_for_one_attempt() -> None:
    used = run(ThreadChoice(2), 5000, lambda threads: seconds(threads, 2))
    assert Counter(used)[1] <= 3


def test_a_longer_text_is_no_reason_to_try_again_and_again() -> None:
    choice = ThreadChoice(4)
    work = iter([0.01 + 0.00002 * place for place in range(5000)])
    used = run(choice, 5000, lambda threads: seconds(threads, 4, next(work)))
    assert sum(threads < 4 for threads in used) <= 30  # ten times as slow at the end, in steps of a half


def test_each_size_of_call_has_its_own_times_and_begins_with_the_latest_number() -> None:
    choice = ThreadChoice(2)
    run(choice, 50, lambda threads: seconds(threads, 1))
    assert choice.threads(5) == 1
    used = run(choice, 200, lambda threads: seconds(threads, 1, 0.05), tokens=5)
    assert usual(used) == 1
    assert usual(run(choice, 50, lambda threads: seconds(threads, 1))) == 1


def test_large_calls_take_all_threads() -> None:
    choice = ThreadChoice(2)
    run(choice, 50, lambda threads: seconds(threads, 1))
    assert set(run(choice, 20, lambda threads: seconds(threads, 1), tokens=MOST_TOKENS + 1)) == {2}


def test_one_thread_stays_one() -> None:
    assert set(run(ThreadChoice(1), 100, lambda threads: 0.01)) == {1}


def test_a_change_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="edgekit"):
        run(ThreadChoice(2), 50, lambda threads: seconds(threads, 1))
    assert [record.message for record in caplog.records] == ["calls of 1 tokens take 1 of 2 threads from now on"]


def supply(folder: Path, name: str, status: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "status").write_text(status + "\n")


def test_threads_spin_briefly_unless_on_battery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGEKIT_SPIN", raising=False)
    assert spin_us(tmp_path / "none") == BRIEFLY_US
    (tmp_path / "AC").mkdir()  # a mains supply has no status
    supply(tmp_path, "BAT0", "Charging")
    assert spin_us(tmp_path) == BRIEFLY_US and not runs_on_battery(tmp_path)
    supply(tmp_path, "BAT1", "Discharging")
    assert spin_us(tmp_path) == 0


def test_edgekit_spin_setting_overrides_battery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supply(tmp_path, "BAT0", "Discharging")
    for setting, expected in (("on", LONG_US), ("off", 0), ("", 0)):
        monkeypatch.setenv("EDGEKIT_SPIN", setting)
        assert spin_us(tmp_path) == expected
    monkeypatch.setenv("EDGEKIT_SPIN", "maybe")
    with pytest.raises(InvalidInput, match="set it to on or off"):
        spin_us(tmp_path)
