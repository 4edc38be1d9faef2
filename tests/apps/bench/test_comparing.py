"""`edgekit compare`: verdicts only if the spread of both runs allows them."""

from __future__ import annotations

from pathlib import Path

import measured
import pytest
from hypothesis import given, settings, strategies as st

from edgekit.apps.bench.measurement import Measurement
from edgekit.apps.bench.report.compare import Difference, compare_runs
from edgekit.apps.bench.report.results import Report, to_json


def decode(before: list[float], after: list[float], **known: object) -> Difference:
    found = compare_runs([measured.measurement(before)], [measured.measurement(after, **known)])
    return next(each for each in found.differences if each.metric == "decode_tokens_per_s")


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([100, 101, 102, 101, 100], [120, 121, 122, 121, 120], "better"),
        ([100, 101, 102, 101, 100], [80, 81, 82, 81, 80], "worse"),
        ([100, 101, 102, 101, 100], [101, 102, 100, 101, 101], "no difference"),
        ([100, 130, 80, 101, 100], [120, 90, 122, 150, 120], "no difference"),
        ([100, 101, 102], [120, 121, 122], "inconclusive"),
        ([100, 101], [101, 101], "inconclusive"),
        ([], [100, 101, 102], "inconclusive"),
        ([100, 101, 102], [], "inconclusive"),
    ],
    ids=["faster", "slower", "equal", "too wide", "three a side", "two a side", "nothing before", "nothing after"],
)
def test_verdicts(before: list[float], after: list[float], verdict: str) -> None:
    assert decode(before, after).verdict == verdict


def test_a_verdict_on_trials_of_one_process_notes_it() -> None:
    def spread(run: Measurement) -> Measurement:
        case = run.cases[0]
        trials = tuple(each.model_copy(update={"process": n % 3}) for n, each in enumerate(case.trials))
        return run.model_copy(update={"cases": (case.model_copy(update={"trials": trials}),)})

    before, after = measured.measurement([100, 101, 102, 101, 100]), measured.measurement([80, 81, 82, 81, 80])
    for one, other, said in (
        (before, after, True), (spread(before), after, True), (spread(before), spread(after), False),
    ):  # fmt: skip
        found = [each for each in compare_runs([one], [other]).differences if each.verdict == "worse"]
        assert found
        assert all(("are from one process" in each.why) == said for each in found)


@given(st.lists(st.floats(50, 200), min_size=3, max_size=8), st.lists(st.floats(50, 200), min_size=3, max_size=8))
@settings(deadline=None, max_examples=60)
def test_no_verdict_lies_within_the_spread(before: list[float], after: list[float]) -> None:
    found = decode(before, after)
    assert found.change is not None
    assert found.noise is not None
    if found.verdict in ("better", "worse"):
        assert abs(found.change) > found.noise
        assert (found.change > 0) == (found.verdict == "better")


def test_lower_latency_is_better() -> None:
    before, after = measured.measurement([100] * 5), measured.measurement([100] * 5)
    slow = tuple(
        trial.model_copy(
            update={"requests": tuple(r.model_copy(update={"first_token_s": 0.3 + n / 100}) for r in trial.requests)}
        )
        for n, trial in enumerate(after.cases[0].trials)
    )
    after = after.model_copy(update={"cases": (after.cases[0].model_copy(update={"trials": slow}),)})
    found = compare_runs([before], [after])
    assert next(each for each in found.differences if each.metric == "first_token_s").verdict == "worse"
    assert found.is_worse


def test_different_workloads_are_not_compared() -> None:
    assert decode([100] * 5, [100] * 5, workload_sha256="d" * 64).verdict == "not comparable"


def test_other_changes_become_notes() -> None:
    one = measured.measurement([100] * 5)
    subject = one.subject.model_copy(update={"artifact_sha256": "f" * 64, "engine_version": "0.2.0"})
    other = one.model_copy(
        update={
            "subject": subject,
            "conditions": measured.conditions(machine_key="1" * 16, power_source="battery", read_gb_s=20.0),
        }
    )
    notes = " ".join(compare_runs([one], [other]).notes)
    for part in ("another artifact", "0.1.0 → 0.2.0", "another machine", "mains → battery", "40 and then 20 GB/s"):
        assert part in notes
    alone: list[Measurement] = [measured.measurement([1.0], name="new")]
    assert compare_runs([one], alone).notes == (
        "new on quick: only in the second run", "onnx cpu s4-g64 on quick: only in the first run",
    )  # fmt: skip


def test_the_command_fails_on_a_regression(tmp_path: Path) -> None:
    for name, speeds in (("a", [100, 101, 102, 101, 100]), ("b", [80, 81, 82, 81, 80])):
        (tmp_path / name).write_text(to_json(Report(title=name, measurements=(measured.measurement(speeds),))))
    done = measured.invoked(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.code == 5
    assert "worse" in done.output
    assert measured.invoked(["compare", str(tmp_path / "b"), str(tmp_path / "a"), "--json"]).code == 0
