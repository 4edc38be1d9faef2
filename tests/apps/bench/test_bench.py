"""`edgekit bench`: subjects take turns, disturbed trials are marked and left out, and failures do not affect others."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measured
import pytest
import runtimes
import shapes
from fake_artifacts import install
from hypothesis import given, settings, strategies as st

from edgekit import OpenOptions
from edgekit.apps.bench.artifact_subjects import subject_of_artifact
from edgekit.apps.bench.machine import Disturbance, Machine, verdict
from edgekit.apps.bench.measurement import Measurement, Trial
from edgekit.apps.bench.peers.program import __file__ as program
from edgekit.apps.bench.prompts import of_user, tokens_of, words
from edgekit.apps.bench.report.results import Report
from edgekit.apps.bench.report.tables import tables
from edgekit.apps.bench.run import bench, expectations
from edgekit.apps.bench.statistics import differ, percentile, shown_summary, summary_of
from edgekit.apps.bench.subject import Subject
from edgekit.apps.bench.trials import ATTEMPTS, BUSY_AFTER, BenchRun
from edgekit.apps.bench.workload import Case, PromptText, Workload, WorkloadRequest, read_workload
from edgekit.common.progress import no_progress
from edgekit.contracts.shared_measurement import read_shared
from edgekit.contracts.token_costs import operations_per_token
from edgekit.errors import InvalidInput, Unsupported
from edgekit.testing import fake_model


@dataclass
class Arena:
    """Artifacts for a benchmark, and the options to run it."""

    folder: Path

    def subject(self, name: str, seed: int = 0, **opening: Any) -> Subject:
        place = self.folder / name
        if not place.exists():
            measured.fake(place, seed=seed)
        return subject_of_artifact(place, OpenOptions(**opening), name)

    def run(
        self, subjects: list[Subject], machine: measured.StillMachine, *, loads: int = 1, **workload: Any
    ) -> list[Measurement]:
        done_of: list[tuple[float, float]] = []

        def progress(done: float, total: float, what: str) -> None:
            assert done <= total
            done_of.append((done, total))

        found = BenchRun(
            subjects,
            measured.workload(**workload),
            machine,
            measured.conditions,
            loads=loads,
            progress=progress,
        ).run()
        assert done_of[-1][0] == done_of[-1][1], "it ends at its end, whoever failed"
        return found


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arena:
    install(tmp_path / "packages", monkeypatch)
    return Arena(tmp_path)


def test_an_undisturbed_run_is_valid_and_complete(arena: Arena) -> None:
    (found,) = arena.run([arena.subject("one")], measured.StillMachine(), depth=0)
    assert found.status == "valid", found.why
    (case,) = found.cases
    assert [trial.repeat for trial in case.trials] == [0, 1, 2]
    assert case.prompt_tokens == (24,)
    assert case.summary["decode_tokens_per_s"].count == 3
    assert all(len(trial.requests[0].gaps_s) == 7 for trial in case.trials)
    assert found.subject.engine == "edgekit fake cpu"
    assert found.subject.formats.linears == "float32"
    assert found.memory.peak_bytes
    assert found.memory.peak_counter
    assert len(found.load_s) == 1
    assert found.predicted is not None
    assert case.roofline is not None
    done = operations_per_token(fake_model()) * case.summary["prefill_tokens_per_s"].median
    assert case.matrix_share == pytest.approx(done / 1e11)
    assert Measurement.model_validate_json(found.model_dump_json()) == found


def test_the_operations_of_a_prompt_token_leave_the_head_out() -> None:
    """Llama 3.2 1B has 1.2358 billion parameters, of which 0.2627 are its tied head."""
    assert operations_per_token(shapes.spec_of(shapes.LLAMA_32_1B)) == pytest.approx(2 * 0.9731e9, rel=1e-4)


def test_subjects_alternate(arena: Arena) -> None:
    seen: list[str] = []

    def progress(done: float, total: float, what: str) -> None:
        if what.startswith("small"):
            seen.append(what.split()[1].strip(","))

    subjects = [arena.subject("A"), arena.subject("B", seed=1)]
    machine = measured.StillMachine()
    BenchRun(
        subjects, measured.workload(repeats=3, warmups=0), machine, measured.conditions, loads=1,
        progress=progress,
    ).run()  # fmt: skip
    assert seen == ["A", "B", "B", "A", "A", "B"]


@pytest.mark.parametrize(
    ("repeats", "loads", "processes"),
    [(3, 2, [0, 0, 1]), (1, 2, [0])],
    ids=["some share one", "more processes than trials"],
)
def test_trials_are_spread_over_fresh_processes(arena: Arena, repeats: int, loads: int, processes: list[int]) -> None:
    seen: list[int] = []

    class Watched(measured.StillMachine):
        def usage(self, processes: Any) -> Any:
            seen.extend(processes)
            return super().usage(processes)

    subjects = [arena.subject("A"), arena.subject("B", seed=1)]
    for found in arena.run(subjects, Watched(), repeats=repeats, loads=loads):
        assert [trial.repeat for trial in found.cases[0].trials] == list(range(repeats))
        assert [trial.process for trial in found.cases[0].trials] == processes
        assert len(found.load_s) == loads
        assert found.status == "valid" and found.memory.peak_bytes
    assert len(set(seen)) == 2 * len(set(processes)), "each subject, each time"


def test_a_crash_in_the_second_process_keeps_the_first_results(arena: Arena, tmp_path: Path) -> None:
    well = arena.subject("one")
    mark = tmp_path / "opened"
    once = f"import os, sys; p = {str(mark)!r}\nif os.path.exists(p): sys.exit('enough')\nopen(p, 'w').close()\n"
    command = (sys.executable, "-c", once + "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])")
    dying = well._replace(command=(*command, *well.command[1:]))
    (found,) = arena.run([dying], measured.StillMachine(), repeats=2, loads=2)
    assert found.status == "failed" and "enough" in found.why
    assert len(found.load_s) == len(found.cases[0].trials) == 1
    assert found.memory.peak_bytes


def test_a_disturbed_trial_is_repeated_and_left_out_of_summaries(arena: Arena) -> None:
    machine = measured.StillMachine(disturbed=[Disturbance(0.5, 0.0), Disturbance(0.0, 0.0)])
    (found,) = arena.run([arena.subject("one")], machine, repeats=2)
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
def test_where_every_trial_was_disturbed_the_median_is_marked(arena: Arena, machine: Any, status: str) -> None:
    (found,) = arena.run([arena.subject("one")], machine(), repeats=2)
    assert found.status == status
    (case,) = found.cases
    assert case.summary == {} and len(case.trials) == 2 * ATTEMPTS
    assert "run again" in found.why
    shown = shown_summary(case, "decode_tokens_per_s")
    assert shown is not None and shown.is_disturbed and shown.summary.count == len(case.trials)


def test_a_machine_that_stays_busy_gets_no_further_repetitions(arena: Arena) -> None:
    busy = [Disturbance(0.0, 0.9)]
    machine = measured.StillMachine(disturbed=busy * BUSY_AFTER + busy + [Disturbance(0.0, 0.0)] + busy * ATTEMPTS)
    (found,) = arena.run([arena.subject("one")], machine, repeats=5)
    repeats = [trial.repeat for trial in found.cases[0].trials]
    assert repeats == [0] * ATTEMPTS + [1] * ATTEMPTS + [2] + [3] + [4] * ATTEMPTS, "an undisturbed trial ends it"


def test_no_trial_is_repeated_on_a_busy_machine(arena: Arena) -> None:
    machine = measured.StillMachine(disturbed=[Disturbance(0.0, 0.9)] * 9)
    run = BenchRun(
        [arena.subject("one")], measured.workload(repeats=3), machine, measured.conditions, loads=1,
        is_busy=True, progress=no_progress,
    )  # fmt: skip
    assert len(run.run()[0].cases[0].trials) == 3
    assert machine.slept == 0


@pytest.mark.parametrize(("share", "is_busy"), [(0.6, True), (0.01, False), (None, False)])
def test_expectations_before_a_run(arena: Arena, share: float | None, is_busy: bool) -> None:
    class Shared:
        def others_share(self) -> float | None:
            return share

    place = measured.fake(arena.folder / "one").folder
    lines = expectations([place], [read_workload("quick")], 3, Shared())  # type: ignore[arg-type]
    # 4 repeats and 3 warm-ups of 128 tokens read and 32 written, at 1 token a second of the fake plan.
    assert lines[0] == "workload quick: about 19 min on an idle machine"
    assert (len(lines) == 2) == is_busy
    if is_busy:
        assert lines[1].startswith("this machine is busy: other programs use 60% of its cores")


def test_a_subject_that_crashes_does_not_stop_the_others(arena: Arena) -> None:
    dying = arena.subject("dying")
    broken = dying._replace(command=(sys.executable, "-c", "import sys; sys.exit('no')"))
    found = arena.run([broken, arena.subject("well", seed=1)], measured.StillMachine())
    assert [each.status for each in found] == ["failed", "valid"]
    assert "no" in found[0].why


def test_a_missing_peer_is_named_with_its_fix(arena: Arena) -> None:
    here = arena.subject("one")
    command = (sys.executable, "-I", "-S", str(program), "llama.cpp")
    absent = here._replace(command=command, fix="pip install llama-cpp-python", opening={"files": "x"})
    (found,) = arena.run([absent], measured.StillMachine())
    assert found.status == "failed"
    assert "pip install llama-cpp-python" in found.why


def test_a_case_that_does_not_fit_is_refused_by_name(arena: Arena) -> None:
    (found,) = arena.run([arena.subject("one")], measured.StillMachine(), prompt=600)
    assert found.status == "refused"
    assert "600" in found.why or "608" in found.why


def test_a_case_beyond_the_models_limit_advises_no_larger_export(arena: Arena) -> None:
    limit = arena.subject("one").model.max_positions
    (found,) = arena.run([arena.subject("one")], measured.StillMachine(), prompt=limit)
    assert f"the model ends at {limit:,} tokens" in found.why and "export" not in found.why


def test_depth_is_fed_before_prefill_is_timed(arena: Arena) -> None:
    (found,) = arena.run([arena.subject("one")], measured.StillMachine(), prompt=100, depth=64)
    request = found.cases[0].trials[0].requests[0]
    assert (request.prompt_tokens, request.timed_tokens) == (100, 36)


def test_a_window_continues_beyond_the_context(arena: Arena) -> None:
    subject = arena.subject("one", window=64, sinks=4)
    (found,) = arena.run([subject], measured.StillMachine(), prompt=40, outputs=100, repeats=1)
    assert found.status == "valid", found.why
    assert found.subject.window == 64


def test_a_draft_is_named_and_its_accepted_tokens_are_counted(arena: Arena) -> None:
    assert arena.subject("one", draft="off").info.draft is None
    subject = arena.subject("one", draft="ngram")
    (found,) = arena.run([subject], measured.StillMachine(), prompt=60, outputs=40, repeats=1)
    assert found.status == "valid", found.why
    assert found.subject.draft == "ngram"
    request = found.cases[0].trials[0].requests[0]
    assert request.tokens == 40
    assert 0 <= request.accepted <= request.proposed


def test_drafting_is_reported(arena: Arena) -> None:
    (found,) = arena.run([arena.subject("one", draft="ngram")], measured.StillMachine(), prompt=60, outputs=60)
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
    (plain,) = arena.run([arena.subject("one")], measured.StillMachine())
    assert plain.speculation is None


def test_memory_by_class_is_predicted_for_the_opened_artifact(arena: Arena) -> None:
    plain, kept = (
        arena.run([arena.subject("one", **opening)], measured.StillMachine(), repeats=1)[0]
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
                WorkloadRequest(
                    prompt=(
                        PromptText(synthetic="code", tokens=96),
                        PromptText(synthetic="prose", seed=seed, tokens=16),
                    ),
                    output_tokens=4,
                )
                for seed in (1, 2)
            ),
        ),
    ),
)


def _agent(arena: Arena, **opening: Any) -> list[Trial]:
    subjects, machine = [arena.subject("one", **opening)], measured.StillMachine()
    (found,) = BenchRun(subjects, AGENT, machine, measured.conditions, loads=1, progress=no_progress).run()
    assert found.status == "valid", found.why
    return list(found.cases[0].trials)


def test_a_shared_prefix_is_computed_once_in_each_trial(arena: Arena) -> None:
    for trial in _agent(arena, prefixes="1MiB"):
        first, second = trial.requests
        assert first.cached_tokens == 0, "a trial begins with nothing known"
        assert 96 <= second.cached_tokens < 112
        assert first.timed_tokens == 112
        assert second.timed_tokens == 112 - second.cached_tokens, "what was known is not counted as prefill"
    for trial in _agent(arena):
        assert [request.cached_tokens for request in trial.requests] == [0, 0], "unless asked for, nothing is kept"


def test_simultaneous_users_are_counted_together(arena: Arena) -> None:
    for trial in _agent(arena, sequences=3):
        assert len(trial.requests) == 6
        assert [each.tokens for each in trial.together] == [12, 12]
        assert all(each.seconds > 0 for each in trial.together)


def test_users_share_only_the_beginning_of_a_prompt() -> None:
    request = AGENT.cases[0].requests[0]
    assert of_user(request, 0) == request
    one, other = of_user(request, 1), of_user(request, 2)
    assert one.prompt[0] == other.prompt[0] == request.prompt[0]
    assert len({each.prompt[-1].seed for each in (request, one, other)}) == 3


def test_more_users_than_an_engine_holds_are_refused_and_not_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgekit.apps.bench import subject_program as arm_program

    monkeypatch.setattr("edgekit.open", lambda path, **opening: runtimes.make_runtime(sequences=2))
    with pytest.raises(Unsupported, match="3 at once, and this engine holds 2"):
        arm_program.ArtifactProgram({"path": "x", "opening": {"sequences": 3}})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--context", "100000"], "100000 tokens exceed the capacity of 512"),
        (["--kv-bits", "0"], "must be at least 1"),
        (["-o", "report.txt"], "give one of .json, .html, .md"),
        (["--prefixes", "lots"], "is not a size"),
        (["-o", "/dev/null/a.md"], "cannot be written"),
        (["--peer-python", "python3"], "name one with --against"),
        (["--prefixes", ""], "is not a size"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_options_are_refused_before_the_run(arena: Arena, options: list[str], said: str) -> None:
    place = measured.fake(arena.folder / "one").folder
    assert said in measured.refused(lambda: measured.invoked(["bench", str(place), "-w", "quick", *options]))


def test_a_run_without_any_result_fails_with_one_line(arena: Arena) -> None:
    place = measured.fake(arena.folder / "one").folder
    arguments = ["bench", str(place), "-w", "quick", "--loads", "1", "--draft", str(arena.folder / "absent")]
    told = measured.refused(lambda: measured.invoked(arguments))
    assert "there is no artifact at" in told and "absent" in told


def test_the_command_prints_one_measurement_a_line(arena: Arena, tmp_path: Path) -> None:
    place = measured.fake(arena.folder / "one").folder
    arguments = ["bench", str(place), "-w", "quick", "--repeats", "1", "--loads", "1", "--json"]
    done = measured.invoked([*arguments, "-o", str(tmp_path / "r.json"), "-o", str(tmp_path / "r.md")])
    assert done.code in (0, 4), done.output
    (line,) = done.stdout.splitlines()
    found = Measurement.model_validate_json(line)
    assert found.workload == "quick"
    assert json.loads((tmp_path / "r.json").read_text())["kind"] == "report"
    assert "## Speed: quick" in (tmp_path / "r.md").read_text()
    assert "workload quick: about" in done.output.replace(done.stdout, "")
    assert found.subject.model in json.loads((tmp_path / "r.json").read_text())["title"]


def test_what_was_measured_is_shared_without_what_is_private(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, file = measured.fake(arena.folder / "secret-project"), tmp_path / "shared.json"
    made = measured.measurement([90.0, 100.0, 104.0])
    subject = {"artifact_sha256": opened.sha256, "name": "secret-project", "model": "/home/ann/secret-project"}
    conditions = made.conditions.model_copy(update={"machine": "AMD EPYC/x", "os": "Linux 6.1.0-ann-laptop"})
    made = made.model_copy(update={"conditions": conditions, "subject": made.subject.model_copy(update=subject)})
    monkeypatch.setattr("edgekit.apps.bench.run.bench", lambda *_, **__: [made])
    words = ["bench", str(opened.folder), "-w", "quick", "--share", str(file)]
    assert measured.invoked(words).code == 0
    (found,) = read_shared(file).measurements
    assert (found.device, found.processor, found.os) == ("fake", "AMD EPYC x", "Linux 6.1.0")
    assert found.cases[0].decode_tokens_per_s[1] == pytest.approx(100)
    assert not any(private in file.read_text() for private in ("ann", "secret", "/", opened.sha256[:8]))
    huge = made.cases[0].model_copy(update={"bytes_per_token": 1 << 60})
    changes = {"step_bytes": {"cases": (huge,)}, "no undisturbed measurement": {"status": "contended"}}
    for said, change in changes.items():
        made = made.model_copy(update=change)
        assert said in measured.refused(lambda: measured.invoked(words))


def test_peers_are_refused_beside_a_window(arena: Arena) -> None:
    place = measured.fake(arena.folder / "one").folder
    with pytest.raises(InvalidInput, match="window"):
        bench([place], measured.workload(), opening=OpenOptions(window=64), against=["mlx-lm"], progress=no_progress)
    for opening in (OpenOptions(sequences=2), OpenOptions(prefixes="1MiB")):
        with pytest.raises(InvalidInput, match="bench against them without it"):
            bench([place], measured.workload(), opening=opening, against=["mlx-lm"], progress=no_progress)
    with pytest.raises(InvalidInput, match="unknown peer 'vllm'"):
        bench([place], measured.workload(), against=["vllm"], progress=no_progress)


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_synthetic_prompts_have_exactly_as_many_tokens_as_asked(kind: Any) -> None:
    def encode(text: str, begins: bool) -> list[int]:
        return ([1] if begins else []) + [len(word) for word in text.split()]

    for count in (1, 17, 500):
        request = WorkloadRequest(prompt=(PromptText(synthetic=kind, tokens=count),), output_tokens=1)
        assert len(tokens_of(request, encode)) == count
    assert words(kind, 1, 3).startswith(words(kind, 1, 2))
    assert words(kind, 1, 1) != words(kind, 2, 1)


def test_parts_that_requests_share_are_shared_tokens() -> None:
    def encode(text: str, begins: bool) -> list[int]:
        return [ord(letter) for letter in text]

    one, other = (
        tokens_of(
            WorkloadRequest(
                prompt=(PromptText(synthetic="code", seed=9, tokens=50), PromptText(text=tail)), output_tokens=1
            ),
            encode,
        )
        for tail in ("first", "second")
    )
    assert one[:50] == other[:50]
    assert one[50:] != other[50:]


def test_a_workload_file_reads_the_texts_beside_it(tmp_path: Path) -> None:
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
def test_a_trial_is_judged_by_its_canaries_and_counters(
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


def test_few_values_never_differ_significantly() -> None:
    assert differ([1, 2, 3], [4, 5, 6]) == pytest.approx(0.1)
    assert differ([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)
    assert differ([1, 2, 3], [1, 2, 3]) == 1.0
    assert differ([], [1]) == 1.0
    assert differ(list(range(20)), list(range(30, 50))) < 1e-6


@given(st.lists(st.integers(0, 9), min_size=13, max_size=30), st.lists(st.integers(0, 9), min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_samples_with_ties_differ_by_their_pairs(one: list[float], other: list[float]) -> None:
    greater = sum((a > b) + 0.5 * (a == b) for a in one for b in other)
    n, m = len(one), len(other)
    deviation = math.sqrt(n * m * (n + m + 1) / 12)
    expected = math.erfc(max(0.0, abs(greater - n * m / 2) - 0.5) / deviation / math.sqrt(2))
    assert differ(one, other) == pytest.approx(expected)


def test_samples_of_a_damaged_store_are_compared_without_their_pairs() -> None:
    """A million values on each side: their 10**12 pairs would take days."""
    assert differ(range(10**6), range(10**6)) == pytest.approx(1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who used the cores")
@pytest.mark.parametrize("seconds", [0.1, 0.4], ids=["short", "long"])
def test_other_busy_programs_are_noticed_in_every_trial(seconds: float) -> None:
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
