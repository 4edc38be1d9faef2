"""The crash guard and the fit guard."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from fake_artifacts import install, make_artifact

import edgekit
from edgekit.artifact.artifact import read_manifest
from edgekit.errors import DoesNotFit
from edgekit.runtime.guard import CrashGuard, GuardRecord, settings_of
from edgekit.runtime.pressure import FitGuard, PressureWatch, waiting_percent
from edgekit.testing import FakeEngine
from edgekit.testing.drafting import Drafting, ReplayDrafter

_START = """
import os, resource, sys
import edgekit
from edgekit.testing import FakeEngine

class Hungry(FakeEngine):  # the cap on memory: the system kills a process whose cache is larger
    def start(self, kv_config):
        if kv_config.capacity_tokens > 512:
            os.kill(os.getpid(), 9)
        return super().start(kv_config)

import edgekit.testing.target as target
target.FakeEngine = Hungry
with edgekit.open(sys.argv[1], guard=sys.argv[2]) as runtime:
    print(runtime.generate("a", max_tokens=12).tokens != (), runtime.kv_config.capacity_tokens, *runtime.notes)
"""


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "target", monkeypatch)
    return make_artifact(tmp_path / "artifact", context=2048)


def test_a_crash_loop_ends_in_a_smaller_setting_by_the_third_start(artifact: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _START, str(artifact), str(tmp_path / "guard.json")]
    ends = [subprocess.run(command, capture_output=True, text=True) for _ in range(4)]
    assert [each.returncode for each in ends] == [-9, -9, 0, 0], [each.stderr for each in ends]
    for each in ends[2:]:  # it stays there
        assert each.stdout.startswith("True 512")
        assert "2 starts in a row died, the last while it was opened (context 2,048)" in each.stdout


def test_starts_that_end_well_change_nothing(artifact: Path, tmp_path: Path) -> None:
    for _ in range(4):
        with edgekit.open(artifact, guard=tmp_path / "guard") as runtime:
            runtime.generate("a", max_tokens=9)
            assert runtime.kv_config.capacity_tokens == 2048 and runtime.notes == ()
    runtime = edgekit.open(artifact, guard=tmp_path / "guard")
    assert runtime.generate("a", max_tokens=1).tokens
    assert GuardRecord.model_validate_json((tmp_path / "guard").read_bytes()).state == "ended well", "a short answer"
    runtime.close()
    for _ in range(4):  # opened and then killed while nothing ran
        guard = CrashGuard(tmp_path / "guard", artifact)
        guard.begin()
        guard.opened()
        assert guard.record.failures == 0


def test_every_step_is_smaller_and_the_last_one_stays(artifact: Path, tmp_path: Path) -> None:
    tokens = []
    for _ in range(8):
        guard = CrashGuard(tmp_path / "guard", artifact)
        guard.begin()
        tokens.append(settings_of(read_manifest(artifact), None)[guard.record.step].tokens)
    assert tokens == [None, None, 512, 256, 256, 256, 256, 256]


def test_damaged_or_foreign_guard_file_is_replaced(artifact: Path, tmp_path: Path) -> None:
    place = tmp_path / "guard"
    for text in ("", "{}", "[1]", GuardRecord(artifact="0" * 64, step=2, failures=9).model_dump_json()):
        place.write_text(text)
        assert CrashGuard(place, artifact).record.step == 0


def test_fit_guard_takes_its_steps_in_order() -> None:
    given_back: list[str] = []
    guard = FitGuard(lambda step: step != "cache bits", given_back.append)
    assert [guard.press() for _ in range(5)] == [("prefixes",), ("idle memory",), ("refuse",), (), ()]
    assert dict(guard.counts) == {"prefixes": 1, "idle memory": 1, "refuse": 1}
    assert guard.taken == ["prefixes", "idle memory", "refuse"], "a step that frees nothing is not in force"
    guard.relax()
    assert given_back == ["refuse"]
    guard.relax(all_steps=True)
    assert given_back == ["refuse", "idle memory", "prefixes"]
    assert guard.press(critical=True) == ("prefixes", "idle memory")


def test_runtime_gives_memory_back_and_reports_it(artifact: Path) -> None:
    with edgekit.open(artifact, prefixes="1MiB") as runtime:
        runtime.generate("one two three four", max_tokens=4)
        assert runtime.metrics().prefix_bytes > 0
        assert runtime.pressure.memory_short() == ("prefixes",)
        assert runtime.metrics().prefix_bytes == 0
        runtime.generate("one two three four", max_tokens=4)
        assert runtime.metrics().prefix_bytes == 0  # and none are kept while memory is short
        while "refuse" not in runtime.metrics().pressure_now:
            assert runtime.pressure.memory_short()
        for ask in (lambda: runtime.generate("a", max_tokens=1), lambda: runtime.score("a", ["b"])):
            with pytest.raises(DoesNotFit, match="new requests are refused for now"):
                ask()
        runtime.pressure.memory_normal()
        assert runtime.metrics().pressure_now == ()
        assert runtime.generate("a", max_tokens=1).tokens
        assert runtime.metrics().pressure_steps["prefixes"] == 1


def test_new_requests_get_narrow_caches_and_running_ones_keep_theirs(artifact: Path) -> None:
    with edgekit.open(artifact, sequences=2) as runtime:
        started: list[int] = []
        start = runtime.engine.start
        runtime.engine.start = lambda storage: started.append(storage.kv_bits) or start(storage)  # type: ignore[method-assign]
        running = runtime.submit("a", max_tokens=30, ignore_eos=True)
        next(iter(running))
        assert runtime.pressure.memory_short(critical=True)[-1] == "cache bits"
        assert runtime.generate("b", max_tokens=1).tokens
        runtime.score("a", ["b"])
        assert running.answer().finish_reason == "length"
        runtime.pressure.memory_normal()
        runtime.generate("c", max_tokens=1)
    assert (started[0], set(started[1:-1]), started[-1]) == (16, {8}, 16)


def test_watch_ends_a_refusal_even_if_nothing_runs(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    percent = [50.0]
    monkeypatch.setattr("edgekit.runtime.pressure.waiting_percent", lambda: percent[0])
    monkeypatch.setattr("edgekit.runtime.pressure._EVERY_S", 0.0)
    monkeypatch.setattr("edgekit.runtime.pressure._REST_S", 0.0)
    with edgekit.open(artifact) as runtime:
        assert runtime.pressure.watch() and runtime.pressure.watch()
        runtime.generate("a", max_tokens=10, ignore_eos=True)
        assert runtime.metrics().pressure_now[-1] == "refuse"
        with pytest.raises(DoesNotFit, match="new requests are refused for now"):
            runtime.generate("a", max_tokens=1)
        percent[0] = 0.0
        assert runtime.generate("a", max_tokens=1).tokens
        assert "refuse" not in runtime.metrics().pressure_now


def test_heat_pauses_drafts_and_lowers_threads(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, state in ((5, "3 of 5 threads"), (None, "threads as at opening: this engine cannot change them")):
        with monkeypatch.context() as patch:
            patch.setattr("edgekit.testing.target.FakeEngine", partial(FakeEngine, threads=threads))
            with edgekit.open(artifact) as runtime:
                assert isinstance(runtime.engine, FakeEngine)
                assert runtime.pressure.set_power() == () == runtime.metrics().saving_now
                for options in ({"is_hot": True}, {"battery_is_low": True}):
                    assert runtime.pressure.set_power(**options) == ("no drafting", state)
                assert runtime.pressure.pauses_drafting and runtime.metrics().saving_now == ("no drafting", state)
                assert runtime.engine.threads == (3 if threads else None)
                assert runtime.generate("a", max_tokens=2).tokens
                assert runtime.pressure.set_power() == () == runtime.metrics().saving_now
                assert runtime.engine.threads == threads and not runtime.pressure.pauses_drafting
                counts = runtime.metrics().pressure_steps
                assert counts == ({"drafting": 1, "threads": 1} if threads else {"drafting": 1})


def test_new_requests_do_not_draft_while_the_battery_is_low(artifact: Path) -> None:
    """Without a controller, which may find at any time that drafts do not pay."""
    with edgekit.open(artifact, drafting=Drafting(lambda prompt: ReplayDrafter([1] * 99))) as runtime:
        runtime.generate("a", max_tokens=60, ignore_eos=True)
        proposed = runtime.metrics().proposed
        assert proposed
        runtime.pressure.set_power(battery_is_low=True)
        runtime.generate("a", max_tokens=60, ignore_eos=True)
        assert runtime.metrics().proposed == proposed
        runtime.pressure.set_power()
        runtime.generate("a", max_tokens=60, ignore_eos=True)
        assert runtime.metrics().proposed > proposed


def test_the_watch_presses_at_most_once_a_second_and_relaxes_after_calm() -> None:
    now, percent = [0.0], [50.0]
    guard = FitGuard(lambda step: True, lambda step: None)
    watch = PressureWatch(guard, read=lambda: percent[0], clock=lambda: now[0])
    for second in range(1, 3):
        now[0] = second
        watch.after_step(1, has_answered=False)
        watch.after_step(1, has_answered=False)
    assert guard.taken == ["prefixes", "idle memory"]
    percent[0] = 0.0
    for second in range(3, 40):
        now[0] = second
        watch.after_step(1, has_answered=False)
    assert guard.taken == []


def test_psi_is_read(tmp_path: Path) -> None:
    place = tmp_path / "memory"
    place.write_text(
        "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"
    )
    assert waiting_percent(place) == 12.5
    assert waiting_percent(tmp_path / "none") is None
