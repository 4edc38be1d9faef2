"""The folder of an installation can be given wherever an artifact can."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_artifacts import install, make_artifact
from published import device_profile

from edgekit.apps.delivery import publish, pull
from edgekit.artifact.artifact import read_manifest
from edgekit.cli import command
from edgekit.contracts.installed import holds_artifact
from edgekit.runtime.speculation.open import drafting_bytes


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path / "target", monkeypatch)
    publish([make_artifact(tmp_path / "artifact")], tmp_path / "site", release="1")
    pull((tmp_path / "site").as_uri(), tmp_path / "app", device=device_profile(tmp_path), allow=["file"])
    return tmp_path / "app"


@pytest.mark.parametrize("words", [["inspect", "--json"], ["verify", "--json"], ["bom"], ["run", "--json", "a"]])
def test_commands_take_an_installation(app: Path, words: list[str]) -> None:
    name, *options = words
    done = CliRunner().invoke(command, [name, str(app), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    expected = CliRunner().invoke(command, [name, str(read_manifest(app).folder), *options])
    if name != "run":  # its answer has times
        assert json.loads(done.stdout) == json.loads(expected.stdout)


def test_memory_of_a_draft_model_is_counted_for_an_installation(app: Path) -> None:
    plan = read_manifest(app).plan
    counted = [drafting_bytes(path, 256, 1, plan) for path in (app, read_manifest(app).folder)]
    assert counted[0] == counted[1] > 0


def test_an_empty_installation_holds_no_artifact(app: Path, tmp_path: Path) -> None:
    assert holds_artifact(app) and holds_artifact(tmp_path / "artifact")
    assert not holds_artifact(tmp_path) and not holds_artifact(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert not holds_artifact(tmp_path / "empty")
