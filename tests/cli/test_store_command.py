"""`edgekit store`, and the artifacts that `run` keeps in it."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from edgekit import OpenOptions
from edgekit.cli import _artifact_for, _export_here, command
from edgekit.common.content_store import Hold
from edgekit.errors import EdgekitError
from edgekit.model.source import DEMO_ARTIFACT, open_source
from edgekit.plugins import load_target

DAY_S = 86_400


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with three entries: of 1, 2 and 4 KiB, used 1, 10 and 100 days ago."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    for place, letter, size, days in (("weights", "a", 1, 1), ("gguf", "b", 2, 10), ("packed", "c", 4, 100)):
        folder = tmp_path / place / (letter * (32 if place == "packed" else 64))
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(b"x" * (size << 10))
        used = time.time() - days * DAY_S
        os.utime(folder, (used, used))
    return tmp_path


def store(*arguments: str) -> str:
    done = CliRunner().invoke(command, ["store", *arguments])
    if isinstance(done.exception, EdgekitError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def kept() -> list[str]:
    return [json.loads(line)["kind"] for line in store("ls", "--json").splitlines()]


def test_entries_are_listed_newest_first_with_their_sum(home: Path) -> None:
    shown = store("ls")
    assert kept() == ["weights", "gguf", "packed"]
    assert shown.endswith(f"3 entries, 7 KiB in {home}\n")
    assert "10 days ago" in shown and "config and tokenizer of GGUF files" in shown


def test_an_entry_is_shown_with_its_files(home: Path) -> None:
    shown = store("show", "bbb")
    assert "2 KiB" in shown and str(home / "gguf") in shown and "data" in shown
    with pytest.raises(EdgekitError, match="key 'z': no entries begin with it; `edgekit store ls`"):
        store("show", "z")


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--older-than", "50"], ["weights", "gguf"]),
        (["--keep", "3KiB"], ["weights", "gguf"]),
        (["--keep", "1KiB"], ["weights"]),
        (["--all"], []),
        (["aaa"], ["gguf", "packed"]),
        (["aaa", "--older-than", "50"], ["gguf"]),
        (["--all", "--dry-run"], ["weights", "gguf", "packed"]),
    ],
)
def test_entries_are_removed_by_key_age_or_size(home: Path, arguments: list[str], left: list[str]) -> None:
    store("prune", *arguments)
    assert kept() == left


def test_every_kind_of_file_in_the_cache_is_seen(home: Path) -> None:
    files = ("real-models/m.gguf", "facts/a/f.json", "hashes/h.json")
    unfinished = ("packed/.making-x/data", "weights/.old.gone/data", ".fetching.x/file", "native/k/library.so")
    for name in (*files, *unfinished):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(b"x" * 10)
    assert set(kept()) >= {name.split("/")[0] for name in files} and len(kept()) == 10
    assert "m.gguf" in store("show", "m.g")
    store("prune", "--all")
    assert kept() == [] and not [path for path in home.rglob("*") if path.is_file()]


def test_what_a_process_uses_is_left_and_the_rest_removed(home: Path) -> None:
    folder = home / "gguf"
    hold = Hold.of(next(folder.iterdir()))
    assert hold is not None
    shown = store("prune", "--all")
    assert kept() == ["gguf"]
    assert shown.splitlines()[-1] == "left bbbbbbbbbbbb (a process uses it); prune again when it has ended"
    with pytest.raises(EdgekitError, match=r"not removed: bbbbbbbbbbbb \(a process uses it\); prune again later"):
        store("prune", "bbb")
    hold.close()
    store("prune", "bbb")
    assert kept() == []


def test_the_lock_of_a_killed_prune_is_removed(home: Path) -> None:
    stale = home / "packed" / f".{'c' * 32}.lock"
    stale.write_text("process 1, boot 2\n")
    store("prune", "--older-than", "1000")
    assert len(kept()) == 3 and not stale.exists()


def test_the_artifact_of_a_running_command_is_held_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    monkeypatch.setattr(_artifact_for, "_is_answered_as_shipped", lambda context, target: False)
    monkeypatch.setattr(
        _export_here, "export_here", lambda source, context, target, out, weights: shutil.copytree(DEMO_ARTIFACT, out)
    )
    with click.Context(click.Command("run")):
        artifact = _artifact_for.artifact_for("demo", OpenOptions())
        assert "left" in store("prune", "--all")
        assert (artifact / "manifest.json").is_file()
    store("prune", "--all")
    assert not artifact.exists()


def test_prune_without_a_selection_removes_nothing(home: Path) -> None:
    with pytest.raises(EdgekitError, match="nothing to remove was named"):
        store("prune")
    with pytest.raises(EdgekitError, match=r"--older-than -1.0: must be at least 0"):
        store("prune", "--older-than", "-1")
    assert len(kept()) == 3


@pytest.mark.onnx
@pytest.mark.quantize
def test_run_makes_the_artifact_of_a_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    model = str(open_source("demo").folder)
    arguments = ["run", model, "def add(a, b):", "--max-tokens", "8", "--context", "256"]
    first = CliRunner().invoke(command, arguments)
    assert first.exit_code == 0, first.output
    assert f"edgekit: making {model} as onnx cpu s8 for this machine: " in first.stderr
    again = CliRunner().invoke(command, arguments)
    assert again.stdout == first.stdout
    assert again.stderr.startswith(f"edgekit: {model} as onnx cpu s8, made earlier\n")
    assert "target onnx cpu s8" in store("ls")
    assert kept().count("artifacts") == 1
    if load_target("llamacpp").missing():
        return
    for name in ("onnx", "executorch"):
        monkeypatch.setattr(type(load_target(name)), "missing", lambda target: "it is not installed")
    for what in (f"making {model} as llamacpp cpu s8 for this machine", f"{model} as llamacpp cpu s8, made earlier"):
        elsewhere = CliRunner().invoke(command, arguments)  # as in an environment with llamacpp alone
        assert elsewhere.stderr.startswith(f"edgekit: {what}") and elsewhere.exit_code == 0, elsewhere.output


@pytest.mark.onnx
def test_demo_is_answered_by_the_artifact_in_the_package_where_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    place = shutil.copytree(DEMO_ARTIFACT, tmp_path / "package")
    monkeypatch.setattr(_artifact_for, "DEMO_ARTIFACT", place)
    before = {path: path.stat() for path in [place, *place.iterdir()]}
    for context in ([], ["--context", "256"]):
        done = CliRunner().invoke(command, ["run", "demo", "def add(a, b):", "--max-tokens", "8", *context])
        assert done.exit_code == 0, done.output
        assert done.stderr.startswith("edgekit: demo as onnx cpu balanced, as it comes with edgekit\n")
    after = {path: path.stat() for path in [place, *place.iterdir()]}
    assert [each.st_mtime_ns for each in after.values()] == [each.st_mtime_ns for each in before.values()]
    assert "artifacts" not in kept()


def test_run_of_a_misspelt_model_has_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    done = CliRunner().invoke(command, ["run", "demmo", "x"])
    assert "does not exist; did you mean demo?" in str(done.exception)
