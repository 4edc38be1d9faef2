"""Files that an earlier version wrote still open: plan, artifact, prefix file and the manifest of neutral weights.

The files in `tests/data/made_before` were written before the modules and classes got their present names.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fake_artifacts import install

import edgekit
from edgekit.contracts.neutral import read_manifest
from edgekit.planner.make import read_plan

BEFORE = Path(__file__).parents[1] / "data/made_before"


def test_an_old_artifact_gives_the_same_answer_and_loads_its_old_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch)
    shutil.copytree(BEFORE / "fake-artifact", tmp_path / "fake")
    shutil.copy(BEFORE / "fake.prefixes", tmp_path)
    (tmp_path / "fake.prefixes").chmod(0o600)
    with edgekit.open(tmp_path / "fake") as runtime:
        assert runtime.load_prefixes(tmp_path / "fake.prefixes") > 0
        answer = runtime.generate("def add(a, b):\n    return a + b\n" * 2, max_tokens=8)
        assert list(answer.tokens) == json.loads((BEFORE / "answer.json").read_text())
        assert answer.timings.cached_tokens > 0


def test_an_old_plan_opens() -> None:
    plan = read_plan(BEFORE / "plan.json")
    assert (plan.target, plan.device, plan.recipe.name) == ("onnx", "raspberry-pi-5-8gb", "s4-g64")


def test_old_neutral_weights_open() -> None:
    manifest = read_manifest(BEFORE / "neutral")
    assert manifest.recipe.name == "s4-g64"
    assert manifest.weights_sha256.startswith("dc8fc605006a9245")
