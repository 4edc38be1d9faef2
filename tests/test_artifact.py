"""Artifacts are whole or refused: sealing, opening, verifying, and everything that can be wrong with a directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from edgekit.artifact import Artifact, open_artifact, seal, staging_for, verify
from edgekit.errors import DamagedArtifact, InvalidInput, OutOfSpace
from edgekit.plan import Plan
from edgekit.planning import make_plans


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plans("demo", ["laptop-x86-16gb"])[0]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def artifact(plan: Plan, tmp_path: Path) -> Artifact:
    staging = staging_for(tmp_path / "made", 100)
    (staging / "weights.bin").write_bytes(bytes(range(256)) * 16)
    (staging / "sub").mkdir()
    (staging / "sub/graph.onnx").write_bytes(b"graph")
    return seal(staging, tmp_path / "made", plan, weights_sha256="1" * 64, tools={"b": "2", "a": "1"}, self_check="ran")


def test_a_sealed_artifact_opens_with_the_plan_it_was_made_by(artifact: Artifact, plan: Plan) -> None:
    found = open_artifact(artifact.folder)
    assert found.plan == plan
    assert found.sha256 == artifact.sha256
    assert list(found.manifest.tools) == ["a", "b"]
    assert verify(artifact.folder, expect=f"sha256:{artifact.sha256}").sha256 == artifact.sha256
    assert not [path for path in artifact.folder.parent.iterdir() if path.name.endswith(".part")]


def test_the_same_files_and_plan_give_the_same_bytes(plan: Plan, tmp_path: Path) -> None:
    hashes = set()
    for name in ("one", "two"):
        staging = staging_for(tmp_path / name, 10)
        (staging / "weights.bin").write_bytes(b"same")
        made = seal(staging, tmp_path / name, plan, weights_sha256="1" * 64, tools={}, self_check="ran")
        hashes.add(made.sha256)
    assert len(hashes) == 1


def flip(folder: Path) -> None:
    data = bytearray((folder / "weights.bin").read_bytes())
    data[1000] ^= 1
    (folder / "weights.bin").write_bytes(data)


def swap_for_link(folder: Path) -> None:
    (folder / "weights.bin").rename(folder.parent / "elsewhere")
    (folder / "weights.bin").symlink_to(folder.parent / "elsewhere")


def swap_folder_for_link(folder: Path) -> None:
    (folder / "sub").rename(folder.parent / "elsewhere")
    (folder / "sub").symlink_to(folder.parent / "elsewhere")


def edit(change: Callable[[dict[str, object]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def name_outside(name: str) -> Callable[[Path], None]:
    def change(manifest: dict[str, object]) -> None:
        files = manifest["files"]
        assert isinstance(files, dict)
        files[name] = files["weights.bin"]

    return edit(change)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit flipped": (flip, "not those that were sealed"),
    "a file cut short": (lambda folder: os.truncate(folder / "weights.bin", 100), "has 100 bytes"),
    "a file missing": (lambda folder: (folder / "weights.bin").unlink(), "is missing"),
    "a file added": (lambda folder: (folder / "extra.bin").write_bytes(b""), "not in the manifest"),
    "a hidden file added": (lambda folder: (folder / ".extra").write_bytes(b""), "not in the manifest"),
    "a symbolic link": (swap_for_link, "regular files|is a link"),
    "a folder behind a link": (swap_folder_for_link, "behind a link|regular files"),
    "a hard link": (lambda folder: os.link(folder / "weights.bin", folder.parent / "other"), "is a link"),
    "a pipe": (lambda folder: os.mkfifo(folder / "pipe"), "regular files"),
    "a name with ..": (name_outside("../weights.bin"), "cannot be a file"),
    "an absolute name": (name_outside("/etc/passwd"), "cannot be a file"),
    "a name with .. inside": (name_outside("sub/../weights.bin"), "cannot be a file"),
    "a name with NUL": (name_outside("a\0b"), "cannot be a file"),
    "the manifest names itself": (name_outside("manifest.json"), "cannot be a file"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "not an artifact"),
    "a manifest cut short": (lambda folder: os.truncate(folder / "manifest.json", 300), "not valid JSON"),
    "a newer manifest": (edit(lambda manifest: manifest.update(version=99)), "upgrade edgekit"),
    "an unknown field": (edit(lambda manifest: manifest.update(surprise=1)), "nobody reads this field"),
    "a wrong type": (edit(lambda manifest: manifest.update(files=[])), "files"),
    "a manifest that is a list": (lambda folder: (folder / "manifest.json").write_text("[]"), "expected an object"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_artifact_is_refused_in_one_line(
    artifact: Artifact, damage: Callable[[Path], object], message: str
) -> None:
    damage(artifact.folder)
    with pytest.raises(InvalidInput, match=message) as caught:
        open_artifact(artifact.folder)
    assert "\n" not in str(caught.value)
    assert str(artifact.folder) in str(caught.value)


def test_damage_after_the_first_opening_is_found_by_the_next(artifact: Artifact) -> None:
    open_artifact(artifact.folder)
    flip(artifact.folder)
    with pytest.raises(DamagedArtifact):
        open_artifact(artifact.folder)


def test_hashes_are_checked_once_and_sizes_always(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr("edgekit.artifact.file_sha256", lambda path: checked.append(path) or "0" * 64)
    with pytest.raises(DamagedArtifact):
        open_artifact(artifact.folder)
    assert checked
    monkeypatch.undo()
    monkeypatch.setenv("EDGEKIT_HOME", str(artifact.folder.parent / "home"))
    open_artifact(artifact.folder)
    monkeypatch.setattr("edgekit.artifact.file_sha256", lambda path: pytest.fail("hashed again"))
    open_artifact(artifact.folder)


def test_another_artifact_is_not_the_one_expected(artifact: Artifact) -> None:
    with pytest.raises(DamagedArtifact, match="another artifact"):
        verify(artifact.folder, expect="f" * 64)
    with pytest.raises(InvalidInput, match="not a sha256"):
        verify(artifact.folder, expect="short")


def test_an_artifact_is_never_overwritten(artifact: Artifact) -> None:
    with pytest.raises(InvalidInput, match="exists already"):
        staging_for(artifact.folder, 0)


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutOfSpace, match="bytes are needed"):
        staging_for(tmp_path / "huge", 1 << 60)
    assert not list(tmp_path.glob(".huge*"))


def test_what_is_not_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, message in ((tmp_path / "file", "not a directory"), (tmp_path / "none", "does not exist")):
        with pytest.raises(InvalidInput, match=message):
            open_artifact(path)
