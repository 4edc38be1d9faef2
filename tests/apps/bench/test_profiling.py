"""`edgekit bench --profile`: operator times on targets with a profiler; other targets are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import measured
import pytest

from edgekit.apps.bench.profiling import CaseProfile
from edgekit.contracts.plan import Plan
from edgekit.contracts.target import OperatorTime, Phase, Profile
from edgekit.testing import FakeTarget

PRODUCT = OperatorTime(name="product", calls=6, total_s=0.006)
SUM = OperatorTime(name="sum", calls=6, total_s=0.004, part_of="product")
LITTLE = OperatorTime(name="copy", calls=6, total_s=0.000_001)


def timed(self: FakeTarget, plan: Plan, files: Path, tokens: Sequence[int], decoded: int) -> Profile:
    """Return the operator times of a fake vendor."""
    phase = Phase(name="prefill", tokens=len(tokens), steps=2, total_s=0.0061, operators=(PRODUCT, SUM, LITTLE))
    return Profile(threads=2, phases=(phase, phase.model_copy(update={"name": "decode", "tokens": decoded})))


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    measured.install_fake(tmp_path / "packages", monkeypatch)
    return str(measured.fake(tmp_path / "artifact").folder)


def test_a_target_without_profiles_is_refused_by_name(artifact: str) -> None:
    said = measured.refused(lambda: measured.invoked(["bench", artifact, "--profile"]))
    assert "--profile: the fake target cannot time its operators" in said


def test_each_phase_is_a_table_of_its_operators(artifact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTarget, "profile", timed, raising=False)
    done = measured.invoked(["bench", artifact, "--profile"])
    assert done.code == 0, done.output
    shown = " ".join(done.stdout.split())
    assert "prefill of 128 tokens, 6.10 ms in 2 steps, 2 threads" in shown
    assert "decode of 32 tokens" in shown
    assert "98.4 %" in shown
    assert "sum (in product)" in shown
    assert "copy" not in shown
    assert "each below 0.1 %" in shown


def test_as_json_it_is_one_profile_a_line(artifact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTarget, "profile", timed, raising=False)
    done = measured.invoked(["bench", artifact, "--profile", "--json", "-w", "quick", "-w", "chat"])
    found = [CaseProfile.model_validate_json(line) for line in done.stdout.splitlines()]
    assert [each.workload for each in found] == ["quick", *["chat"] * (len(found) - 1)]
    assert len(found) > 1
    assert found[0].profile.phases[0].operators == (PRODUCT, SUM, LITTLE)


@pytest.mark.parametrize("option", [["--exact"], ["--window", "32"], ["--against", "mlx-lm"], ["--repeats", "2"]])
def test_options_without_effect_on_a_profile_are_refused(artifact: str, option: list[str]) -> None:
    said = measured.refused(lambda: measured.invoked(["bench", artifact, "--profile", *option]))
    assert f"--profile does not take {option[0]}" in said


def test_a_case_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, artifact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTarget, "profile", timed, raising=False)
    small = str(measured.fake(tmp_path / "small", context=64).folder)
    said = measured.refused(lambda: measured.invoked(["bench", small, "--profile"]))
    assert said.startswith("--profile: 128 in, 32 out:")
