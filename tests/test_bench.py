"""`edgekit bench`: arms take turns, disturbed trials are marked and never averaged in, failures stay their own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measured
import pytest
import runtimes
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekit.errors import InvalidInput, Unsupported
from edgekit.measure.bench import ATTEMPTS, Bench, Contender
from edgekit.measure.contest import bench
from edgekit.measure.energy import Meter, meter
from edgekit.measure.entrants import Opening, entrant_of
from edgekit.measure.machine import Disturbance, Machine, verdict
from edgekit.measure.measurement import Measurement, Trial
from edgekit.measure.peers.program import __file__ as program
from edgekit.measure.prompts import of_user, tokens_of, words
from edgekit.measure.report.tables import tables
from edgekit.measure.results import Report
from edgekit.measure.statistics import differ, percentile, summary_of
from edgekit.measure.workload import Case, Request, Text, Workload, bundled_workloads, read_workload
from edgekit.runtime.text import read_codec
from edgekit.testing import fake_model
from edgekit.testing.adapters import write_adapter
from edgekit.weights.quantise import quiet


@dataclass
class Arena:
    """Artifacts that a bench can run, and how."""

    folder: Path

    def contender(self, name: str, seed: int = 0, **opening: Any) -> Contender:
        place = self.folder / name
        if not place.exists():
            measured.fake(place, seed=seed)
        codec = read_codec(place)
        return Contender(
            entrant_of(place, Opening(**opening), name),
            fake_model(vocabulary=codec.vocabulary),
            lambda text, begins: codec.encode(text, add_special_tokens=begins),
        )

    def run(
        self, contenders: list[Contender], machine: measured.StillMachine, *, loads: int = 1, **workload: Any
    ) -> list[Measurement]:
        done_of: list[tuple[float, float]] = []

        def progress(done: float, total: float, what: str) -> None:
            assert done <= total
            done_of.append((done, total))

        found = Bench(
            contenders,
            measured.workload(**workload),
            machine,
            Meter([], "a test"),
            measured.conditions,
            loads=loads,
            progress=progress,
        ).run()
        assert done_of[-1][0] == done_of[-1][1], "it ends at its end, whoever failed"
        return found


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arena:
    measured.install_fake(tmp_path / "packages", monkeypatch)
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    return Arena(tmp_path)


def test_a_quiet_run_is_valid_and_says_everything_about_its_arm(arena: Arena) -> None:
    (found,) = arena.run([arena.contender("one")], measured.StillMachine(), depth=0)
    assert found.status == "valid", found.why
    (case,) = found.cases
    assert [trial.repeat for trial in case.trials] == [0, 1, 2]
    assert case.prompt_tokens == (24,)
    assert case.summary["decode_tokens_per_s"].count == 3
    assert all(len(trial.requests[0].gaps_s) == 7 for trial in case.trials)
    assert found.arm.engine == "edgekit fake cpu"
    assert found.arm.formats.linears == "float32"
    assert found.memory.peak_bytes
    assert found.memory.peak_counter
    assert len(found.load_s) == 1
    assert found.predicted is not None
    assert case.roofline is not None
    assert found.energy_source is None
    assert any("energy: not measured" in note for note in found.notes)
    assert Measurement.model_validate_json(found.model_dump_json()) == found


def test_arms_take_turns_and_who_begins_changes(arena: Arena) -> None:
    seen: list[str] = []

    def progress(done: float, total: float, what: str) -> None:
        if what.startswith("small"):
            seen.append(what.split()[1].strip(","))

    contenders = [arena.contender("A"), arena.contender("B", seed=1)]
    machine = measured.StillMachine()
    Bench(
        contenders, measured.workload(repeats=3, warmups=0), machine, Meter([], ""), measured.conditions, loads=1,
        progress=progress,
    ).run()  # fmt: skip
    assert seen == ["A", "B", "B", "A", "A", "B"]


@pytest.mark.parametrize(
    ("repeats", "loads", "processes"),
    [(5, 3, [0, 0, 1, 1, 2]), (3, 3, [0, 1, 2]), (1, 2, [0]), (3, 1, [0, 0, 0])],
    ids=["some share one", "one each", "more processes than trials", "one process"],
)
def test_trials_are_spread_over_fresh_processes(arena: Arena, repeats: int, loads: int, processes: list[int]) -> None:
    seen: list[int] = []

    class Watched(measured.StillMachine):
        def usage(self, processes: Any) -> Any:
            seen.extend(processes)
            return super().usage(processes)

    contenders = [arena.contender("A"), arena.contender("B", seed=1)]
    for found in arena.run(contenders, Watched(), repeats=repeats, loads=loads):
        assert [trial.repeat for trial in found.cases[0].trials] == list(range(repeats))
        assert [trial.process for trial in found.cases[0].trials] == processes
        assert len(found.load_s) == loads
        assert found.status == "valid" and found.memory.peak_bytes
    assert len(set(seen)) == 2 * len(set(processes)), "each arm, each time"


def test_an_arm_that_dies_in_its_second_process_keeps_what_it_told(arena: Arena, tmp_path: Path) -> None:
    well = arena.contender("one")
    mark = tmp_path / "opened"
    once = f"import os, sys; p = {str(mark)!r}\nif os.path.exists(p): sys.exit('enough')\nopen(p, 'w').close()\n"
    command = (sys.executable, "-c", once + "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
    dying = well._replace(entrant=well.entrant._replace(command=(*command, *well.entrant.command[1:])))
    (found,) = arena.run([dying], measured.StillMachine(), repeats=2, loads=2)
    assert found.status == "failed" and "enough" in found.why
    assert len(found.load_s) == len(found.cases[0].trials) == 1
    assert found.memory.peak_bytes


def test_a_disturbed_trial_is_kept_made_again_and_in_no_summary(arena: Arena) -> None:
    machine = measured.StillMachine(disturbed=[Disturbance(0.5, 0.0), Disturbance(0.0, 0.0)])
    (found,) = arena.run([arena.contender("one")], machine, repeats=2)
    trials = found.cases[0].trials
    assert [(trial.repeat, trial.attempt, trial.invalid) for trial in trials] == [
        (0, 0, "contended"), (0, 1, None), (1, 0, None),
    ]  # fmt: skip
    assert found.status == "valid"
    assert {summary.count for name, summary in found.cases[0].summary.items()} == {2}
    assert machine.slept > 0


@pytest.mark.parametrize(
    ("machine", "status"),
    [
        (lambda: measured.StillMachine(disturbed=[Disturbance(0.0, 0.9)] * 9), "contended"),
        (lambda: measured.StillMachine(canaries=[1.5] * 99), "throttled"),
    ],
    ids=["a busy neighbour", "heat"],
)
def test_where_every_trial_was_disturbed_there_is_no_number(arena: Arena, machine: Any, status: str) -> None:
    (found,) = arena.run([arena.contender("one")], machine(), repeats=2)
    assert found.status == status
    assert found.cases[0].summary == {}
    assert len(found.cases[0].trials) == 2 * ATTEMPTS
    assert "run again" in found.why


def _hurried() -> Machine:
    machine = Machine()
    machine.sleep = lambda seconds: None  # type: ignore[method-assign]
    return machine


def test_the_same_bench_twice_agrees_or_says_by_how_much_it_does_not(arena: Arena) -> None:
    from edgekit.measure.compare import compare_runs

    runs = [arena.run([arena.contender("one")], measured.StillMachine(), repeats=4) for _ in range(2)]
    found = compare_runs(runs[0], runs[1])
    assert len(found.differences) == 4
    for each in found.differences:
        assert each.change is not None
        assert each.noise is not None
        within = abs(each.change) <= each.noise
        assert (each.verdict in ("better", "worse")) <= (not within)
        assert (each.verdict == "no difference") == within


def test_an_arm_that_dies_is_a_result_and_the_others_go_on(arena: Arena) -> None:
    dying = arena.contender("dying")
    broken = dying._replace(
        entrant=dying.entrant._replace(command=(sys.executable, "-c", "import sys; sys.exit('no')"))
    )
    found = arena.run([broken, arena.contender("well", seed=1)], measured.StillMachine())
    assert [each.status for each in found] == ["failed", "valid"]
    assert "no" in found[0].why


def test_an_absent_peer_is_named_with_its_cure(arena: Arena) -> None:
    here = arena.contender("one")
    command = (sys.executable, "-I", "-S", str(program), "llama.cpp")
    absent = here._replace(
        entrant=here.entrant._replace(command=command, cure="pip install llama-cpp-python", opening={"files": "x"})
    )
    (found,) = arena.run([absent], measured.StillMachine())
    assert found.status == "failed"
    assert "pip install llama-cpp-python" in found.why


def test_a_case_that_does_not_fit_is_refused_by_name(arena: Arena) -> None:
    (found,) = arena.run([arena.contender("one")], measured.StillMachine(), prompt=600)
    assert found.status == "refused"
    assert "600" in found.why or "608" in found.why


def test_depth_is_fed_before_prefill_is_timed(arena: Arena) -> None:
    (found,) = arena.run([arena.contender("one")], measured.StillMachine(), prompt=100, depth=64)
    request = found.cases[0].trials[0].requests[0]
    assert (request.prompt_tokens, request.timed_tokens) == (100, 36)


def test_a_window_goes_on_past_the_context(arena: Arena) -> None:
    contender = arena.contender("one", window=64, sinks=4)
    (found,) = arena.run([contender], measured.StillMachine(), prompt=40, outputs=100, repeats=1)
    assert found.status == "valid", found.why
    assert found.arm.window == 64


def test_a_draft_is_named_and_what_it_gained_is_counted(arena: Arena) -> None:
    contender = arena.contender("one", draft="ngram")
    (found,) = arena.run([contender], measured.StillMachine(), prompt=60, outputs=40, repeats=1)
    assert found.status == "valid", found.why
    assert found.arm.draft == "ngram"
    request = found.cases[0].trials[0].requests[0]
    assert request.tokens == 40
    assert 0 <= request.accepted <= request.proposed


def test_what_drafting_did_is_told_whole(arena: Arena) -> None:
    (found,) = arena.run([arena.contender("one", draft="ngram")], measured.StillMachine(), prompt=60, outputs=60)
    told = found.speculation
    assert told is not None
    assert told.reason
    assert [kind.name for kind in told.proposals] == ["ngram"]
    assert told.tokens_per_step is not None
    assert told.tokens_per_step >= 1
    (table,) = [each for each in tables(Report(title="", measurements=(found,))) if each.title == "Drafting"]
    assert table.rows[0][2:4] == ("ngram", "on" if told.is_on else "off")
    assert told.reason in table.rows[0]
    assert Measurement.model_validate_json(found.model_dump_json()) == found
    (plain,) = arena.run([arena.contender("one")], measured.StillMachine())
    assert plain.speculation is None


def test_memory_is_told_by_class_and_predicted_as_it_was_opened(arena: Arena) -> None:
    plain, kept = (
        arena.run([arena.contender("one", **opening)], measured.StillMachine(), repeats=1)[0]
        for opening in ({}, {"prefixes": "1MiB"})
    )
    assert plain.predicted is not None
    assert kept.predicted is not None
    assert kept.predicted.total_bytes - plain.predicted.total_bytes == 1 << 20
    assert {"cache", "prefixes"} <= {each.name for each in kept.memory.classes}


AGENT = Workload(
    name="agent",
    title="Two steps that begin alike",
    repeats=2,
    cases=(
        Case(
            name="shared",
            requests=tuple(
                Request(
                    prompt=(Text(synthetic="code", tokens=96), Text(synthetic="prose", seed=seed, tokens=16)),
                    output_tokens=4,
                )
                for seed in (1, 2)
            ),
        ),
    ),
)


def _agent(arena: Arena, **opening: Any) -> list[Trial]:
    contenders, machine = [arena.contender("one", **opening)], measured.StillMachine()
    (found,) = Bench(
        contenders, AGENT, machine, Meter([], "a test"), measured.conditions, loads=1, progress=quiet
    ).run()
    assert found.status == "valid", found.why
    return list(found.cases[0].trials)


def test_a_shared_prefix_is_computed_once_a_trial_where_prefixes_are_kept(arena: Arena) -> None:
    for trial in _agent(arena, prefixes="1MiB"):
        first, second = trial.requests
        assert first.cached_tokens == 0, "a trial begins with nothing known"
        assert 96 <= second.cached_tokens < 112
        assert first.timed_tokens == 112
        assert second.timed_tokens == 112 - second.cached_tokens, "what was known is not counted as prefill"
    for trial in _agent(arena):
        assert [request.cached_tokens for request in trial.requests] == [0, 0], "unless asked for, nothing is kept"


def test_users_at_once_each_ask_everything_and_are_counted_together(arena: Arena) -> None:
    for trial in _agent(arena, sequences=3):
        assert len(trial.requests) == 6
        assert [each.tokens for each in trial.together] == [12, 12]
        assert all(each.seconds > 0 for each in trial.together)


def test_users_share_how_a_prompt_begins_and_not_how_it_ends() -> None:
    request = AGENT.cases[0].requests[0]
    assert of_user(request, 0) == request
    one, other = of_user(request, 1), of_user(request, 2)
    assert one.prompt[0] == other.prompt[0] == request.prompt[0]
    assert len({each.prompt[-1].seed for each in (request, one, other)}) == 3


def test_an_adapter_is_named_and_one_that_does_not_fit_is_refused_before_anything_runs(arena: Arena) -> None:
    model = arena.contender("one").model
    write_adapter(arena.folder / "lora", model, rank=4)
    with pytest.raises(Unsupported, match="export it again with --adapter-rank 4"):
        arena.contender("one", adapter=("formal", arena.folder / "lora"))


def test_more_users_than_an_engine_holds_are_refused_and_not_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgekit.measure import arm_program

    monkeypatch.setattr("edgekit.open", lambda path, **opening: runtimes.make_runtime(sequences=2))
    with pytest.raises(Unsupported, match="3 at once, and this engine holds 2"):
        arm_program.Artifact({"path": "x", "opening": {"sequences": 3}})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--context", "100000"], "100000 tokens are more than the 512 that there is room for"),
        (["--sinks", "4"], "sinks belong to a window"),
        (["--title", "x" * 500], "500 characters, and at most 400"),
        (["--prefixes", "lots"], "is not a size"),
        (["--adapter", "lora"], "must be NAME=PATH"),
        (["-o", "."], "name a file in it"),
        (["--peer-python", "python3"], "name one with --against"),
        (["--prefixes", ""], "is not a size"),
        (["--adapter", ""], "must be NAME=PATH"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_is_refused_before_anything_runs(arena: Arena, options: list[str], said: str) -> None:
    place = measured.fake(arena.folder / "one").folder
    assert said in measured.refused(lambda: measured.invoked(["bench", str(place), "-w", "quick", *options]))


def test_where_nothing_ran_the_command_says_why_in_one_line(arena: Arena) -> None:
    place = measured.fake(arena.folder / "one").folder
    arguments = ["bench", str(place), "-w", "quick", "--loads", "1", "--draft", str(arena.folder / "absent")]
    told = measured.refused(lambda: measured.invoked(arguments))
    assert "there is no artifact at" in told and "absent" in told


def test_the_command_prints_one_measurement_a_line(arena: Arena, tmp_path: Path) -> None:
    place = measured.fake(arena.folder / "one").folder
    arguments = ["bench", str(place), "-w", "quick", "--repeats", "1", "--loads", "1", "--json"]
    done = measured.invoked([*arguments, "-o", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md")])
    assert done.code in (0, 4), done.output
    (line,) = done.stdout.splitlines()
    found = Measurement.model_validate_json(line)
    assert found.workload == "quick"
    assert json.loads((tmp_path / "r.json").read_text())["kind"] == "report"
    assert "## Speed: quick" in (tmp_path / "r.md").read_text()


def test_peers_are_refused_beside_a_window(arena: Arena) -> None:
    place = measured.fake(arena.folder / "one").folder
    with pytest.raises(InvalidInput, match="window"):
        bench([place], measured.workload(), opening=Opening(window=64), against=["transformers"], progress=quiet)
    for opening in (Opening(sequences=2), Opening(prefixes="1MiB")):
        with pytest.raises(InvalidInput, match="bench against them without it"):
            bench([place], measured.workload(), opening=opening, against=["transformers"], progress=quiet)
    with pytest.raises(InvalidInput, match="unknown peer 'vllm'"):
        bench([place], measured.workload(), against=["vllm"], progress=quiet)


@pytest.mark.parametrize("name", sorted(bundled_workloads()))
def test_bundled_workloads_are_sound(name: str) -> None:
    found = read_workload(name)
    assert found.name == name
    assert found.title


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_synthetic_prompts_have_exactly_as_many_tokens_as_asked(kind: Any) -> None:
    def encode(text: str, begins: bool) -> list[int]:
        return ([1] if begins else []) + [len(word) for word in text.split()]

    for count in (1, 17, 500):
        request = Request(prompt=(Text(synthetic=kind, tokens=count),), output_tokens=1)
        assert len(tokens_of(request, encode)) == count
    assert words(kind, 1, 3).startswith(words(kind, 1, 2))
    assert words(kind, 1, 1) != words(kind, 2, 1)


def test_parts_that_requests_share_are_shared_tokens() -> None:
    def encode(text: str, begins: bool) -> list[int]:
        return [ord(letter) for letter in text]

    one, other = (
        tokens_of(Request(prompt=(Text(synthetic="code", seed=9, tokens=50), Text(text=tail)), output_tokens=1), encode)
        for tail in ("first", "second")
    )
    assert one[:50] == other[:50]
    assert one[50:] != other[50:]


def test_a_workload_of_ones_own_reads_texts_beside_it(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("one two three")
    (tmp_path / "w.yaml").write_text(
        "version: 1\nname: own\ntitle: Own\ncases:\n  - name: a\n    requests:\n"
        "      - {prompt: [{file: words.txt}], output_tokens: 4}\n"
    )
    found = read_workload(tmp_path / "w.yaml")
    assert found.cases[0].requests[0].prompt[0].text == "one two three"
    (tmp_path / "w.yaml").write_text((tmp_path / "w.yaml").read_text().replace("words.txt", "../secret"))
    assert "plain name" in measured.refused(lambda: read_workload(tmp_path / "w.yaml"))
    assert "known: a YAML file, agent" in measured.refused(lambda: read_workload("nothing"))


@pytest.mark.parametrize(
    ("before", "after", "found", "expected"),
    [
        (1.0, 1.05, Disturbance(0.01, 0.01), None),
        (1.0, 1.0, Disturbance(0.2, None), "contended"),
        (1.0, 1.0, Disturbance(0.0, 0.2), "contended"),
        (1.0, 1.2, Disturbance(0.0, 0.0), "throttled"),
        (1.2, 1.0, Disturbance(None, None), "contended"),
    ],
    ids=["quiet", "threads waited", "others ran", "slow without company", "slow, and nobody can tell why"],
)
def test_a_trial_is_judged_by_the_canary_and_the_company(
    before: float, after: float, found: Disturbance, expected: str | None
) -> None:
    assert verdict(before, after, found) == expected


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_a_summary_lies_within_its_values(values: list[float]) -> None:
    found = summary_of(values)
    assert found.low == min(values)
    assert found.high == max(values)
    assert found.low <= found.median <= found.high
    assert percentile(values, 0.0) == found.low


def test_ranks_are_told_apart_only_by_enough_of_them() -> None:
    assert differ([1, 2, 3], [4, 5, 6]) == pytest.approx(0.1)
    assert differ([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)
    assert differ([1, 2, 3], [1, 2, 3]) == 1.0
    assert differ([], [1]) == 1.0
    assert differ(list(range(20)), list(range(30, 50))) < 1e-6


def test_rapl_is_read_past_the_end_of_its_range(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/powercap/intel-rapl:0"
    folder.mkdir(parents=True)
    (folder / "name").write_text("package-0\n")
    (folder / "max_energy_range_uj").write_text("1000000\n")
    (folder / "energy_uj").write_text("900000\n")
    found = meter(tmp_path, open_nvml=lambda: None)
    assert found.source == "RAPL package-0"
    before = found.joules()
    (folder / "energy_uj").write_text("100000\n")
    after = found.joules()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(0.2)


def test_where_nothing_counts_energy_it_is_absent_and_said(tmp_path: Path) -> None:
    found = meter(tmp_path, open_nvml=lambda: None)
    assert found.joules() is None
    assert found.why == "no RAPL counters; no NVML energy counter"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who used the cores")
@pytest.mark.parametrize("seconds", [0.1, 0.4], ids=["short", "long"])
def test_a_busy_neighbour_is_noticed_in_every_trial(seconds: float) -> None:
    machine = Machine()
    work = f"import time; end = time.perf_counter() + {seconds} + 0.2\nwhile time.perf_counter() < end: pass"
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * machine.cores)]
    try:
        time.sleep(0.2)
        for _ in range(3):
            with subprocess.Popen([sys.executable, "-c", work]) as own:
                time.sleep(0.1)
                before = machine.usage([own.pid])
                time.sleep(seconds)
                found = machine.between(before, machine.usage([own.pid]))
            assert found.is_contended and verdict(1.0, 1.0, found) == "contended", found
            assert found.others_share is not None and found.others_share > 0.2
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
