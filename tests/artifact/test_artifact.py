"""Sealing, opening and verifying artifacts, and refusing damaged ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from manifests import change_manifest

from edgekit.artifact.artifact import Artifact, open_artifact, seal, verify
from edgekit.cli import command
from edgekit.common.staging import staging_for
from edgekit.contracts.plan import Plan
from edgekit.errors import DamagedArtifact, InvalidInput, OutOfSpace
from edgekit.planner.make import make_plans

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plans("demo", ["laptop-x86-16gb"])[0]


@pytest.fixture
def artifact(plan: Plan, tmp_path: Path) -> Artifact:
    staging = staging_for(tmp_path / "made", 100)
    (staging / "weights.bin").write_bytes(bytes(range(256)) * 16)
    (staging / "sub").mkdir()
    (staging / "sub/graph.onnx").write_bytes(b"graph")
    return seal(staging, tmp_path / "made", plan, weights_sha256="1" * 64, tools={"b": "2", "a": "1"}, self_check="ran")


def test_a_sealed_artifact_opens_with_its_plan(artifact: Artifact, plan: Plan) -> None:
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


def test_version_1_plan_keeps_its_quantisation_note(plan: Plan) -> None:
    assert any("rounds weights to the nearest" in note for note in plan.all_notes)
    plain = json.loads(plan.to_json()) | {"version": 1, "notes": ["gptq chose the integers on text.txt"]}
    del plain["quantisation"]
    older = Plan.model_validate_json(json.dumps(plain))
    assert older.all_notes == ("gptq chose the integers on text.txt",)


def flip(folder: Path) -> None:
    data = bytearray((folder / "weights.bin").read_bytes())
    data[1000] ^= 1
    (folder / "weights.bin").write_bytes(data)


def swap_for_link(folder: Path) -> None:
    (folder / "weights.bin").rename(folder.parent / "elsewhere")
    (folder / "weights.bin").symlink_to(folder.parent / "elsewhere")


def swap_for_pipe(folder: Path) -> None:
    (folder / "weights.bin").unlink()
    os.mkfifo(folder / "weights.bin")


def swap_for_folder(folder: Path) -> None:
    (folder / "weights.bin").unlink()
    (folder / "weights.bin").mkdir()


def remove_seal(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["seal"]
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def swap_folder_for_link(folder: Path) -> None:
    (folder / "sub").rename(folder.parent / "elsewhere")
    (folder / "sub").symlink_to(folder.parent / "elsewhere")


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: change_manifest(folder / "manifest.json", change)


def set_field(path: str, value: object) -> Callable[[Path], None]:
    def change(manifest: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        inner: Any = manifest
        for key in parents:
            inner = inner[int(key) if isinstance(inner, list) else key]
        inner[last] = value

    return edit(change)


def name_outside(name: str) -> Callable[[Path], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"]["weights.bin"]

    return edit(change)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit flipped": (flip, "not those that were sealed"),
    "a file cut short": (lambda folder: os.truncate(folder / "weights.bin", 100), "has 100 bytes"),
    "a file missing": (lambda folder: (folder / "weights.bin").unlink(), "is missing"),
    "a file added": (lambda folder: (folder / "extra.bin").write_bytes(b""), "not in the manifest"),
    "a symbolic link": (swap_for_link, "regular files|is a link"),
    "a folder behind a link": (swap_folder_for_link, "behind a link|regular files"),
    "a hard link": (lambda folder: os.link(folder / "weights.bin", folder.parent / "other"), "hard links"),
    "a pipe": (lambda folder: os.mkfifo(folder / "pipe"), "regular files"),
    "a pipe in a file's place": (swap_for_pipe, "is a pipe, socket or device"),
    "a directory in a file's place": (swap_for_folder, "is a directory"),
    "a hard-linked manifest": (lambda folder: os.link(folder / "manifest.json", folder.parent / "other"), "hard links"),
    "a name with ..": (name_outside("../weights.bin"), "cannot be a file"),
    "an absolute name": (name_outside("/etc/passwd"), "cannot be a file"),
    "a name with .. inside": (name_outside("sub/../weights.bin"), "cannot be a file"),
    "a name with NUL": (name_outside("a\0b"), "cannot be a file"),
    "the manifest names itself": (name_outside("manifest.json"), "cannot be a file"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "not an artifact"),
    "a manifest cut short": (lambda folder: os.truncate(folder / "manifest.json", 300), "not valid JSON"),
    "a newer manifest": (edit(lambda manifest: manifest.update(version=99)), "upgrade edgekit"),
    "an unknown field": (edit(lambda manifest: manifest.update(surprise=1)), "unknown field"),
    "a seal cut off": (remove_seal, "its seal is missing"),
    "version 0": (edit(lambda manifest: manifest.update(version=0)), "version"),
    "a true version": (edit(lambda manifest: manifest.update(version=True)), "no version"),
    "a hash that is none": (set_field("weights_sha256", "0"), "weights_sha256"),
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


OUT_OF_BOUNDS: dict[str, object] = {
    "plan.version": 0,
    "plan.backend": "\n",
    "plan.chunk_tokens": 0,
    "plan.sequences": 10**9,
    "plan.storage.capacity_tokens": 3,
    "plan.model.layers": [],
    "plan.model.ropes.default.dim": 10**9,
    "plan.model.layers.0.rope": "none of them",
    "plan.model.layers.0.kv_heads": 5,
    "plan.model.vocab_size": 1 << 40,
    "plan.memory.scale_group": 0,
    "plan.exits": [4000],
}


@pytest.mark.parametrize(("field", "value"), OUT_OF_BOUNDS.items(), ids=list(OUT_OF_BOUNDS))
def test_out_of_bounds_value_is_refused_with_its_field(artifact: Artifact, field: str, value: object) -> None:
    set_field(field, value)(artifact.folder)
    with pytest.raises(InvalidInput) as caught:
        open_artifact(artifact.folder)
    assert field.rpartition(".")[2] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_version_1_artifact_opens_as_unsealed(artifact: Artifact) -> None:
    edit(lambda manifest: (manifest.update(version=1), manifest["plan"].update(version=1)))(artifact.folder)
    remove_seal(artifact.folder)
    assert not open_artifact(artifact.folder).is_sealed
    found = CliRunner().invoke(command, ["verify", str(artifact.folder)])
    assert found.exit_code == 0 and "unsealed: " in found.output
    as_json = json.loads(CliRunner().invoke(command, ["verify", str(artifact.folder), "--json"]).output)
    assert as_json["sealed"] is False


def test_damage_after_the_first_opening_is_found_by_the_next(artifact: Artifact) -> None:
    open_artifact(artifact.folder)
    flip(artifact.folder)
    with pytest.raises(DamagedArtifact):
        open_artifact(artifact.folder)


def test_hashes_are_checked_once_and_sizes_always(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr("edgekit.artifact.artifact.file_sha256", lambda path: checked.append(path) or "0" * 64)
    with pytest.raises(DamagedArtifact):
        open_artifact(artifact.folder)
    assert checked
    monkeypatch.undo()
    monkeypatch.setenv("EDGEKIT_HOME", str(artifact.folder.parent / "home"))
    open_artifact(artifact.folder)
    monkeypatch.setattr("edgekit.artifact.artifact.file_sha256", lambda path: pytest.fail("hashed again"))
    open_artifact(artifact.folder)


def test_verify_refuses_an_unexpected_hash(artifact: Artifact) -> None:
    with pytest.raises(DamagedArtifact, match="another artifact"):
        verify(artifact.folder, expect="f" * 64)
    with pytest.raises(InvalidInput, match="not a sha256"):
        verify(artifact.folder, expect="short")


def test_an_artifact_is_never_overwritten(artifact: Artifact) -> None:
    with pytest.raises(InvalidInput, match="exists already"):
        staging_for(artifact.folder, 0)


def test_output_of_another_running_export_is_refused(tmp_path: Path) -> None:
    first = staging_for(tmp_path / "made", 0)
    other = first.with_name(first.name.replace(f".{os.getpid()}.", f".{os.getppid()}."))
    first.rename(other)
    with pytest.raises(InvalidInput, match=f"process {os.getppid()} is writing it"):
        staging_for(tmp_path / "made", 0)
    other.rename(first.with_name(first.name.replace(f".{os.getpid()}.", ".4194999.")))
    assert staging_for(tmp_path / "made", 0).is_dir()
    assert [path.name for path in tmp_path.glob(".made.*")] == [first.name], "the directory of a dead one is removed"


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(OutOfSpace, match="bytes are needed"):
        staging_for(tmp_path / "huge", 1 << 60)
    assert not list(tmp_path.glob(".huge*"))


def test_a_path_that_is_not_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, message in ((tmp_path / "file", "not a directory"), (tmp_path / "none", "does not exist")):
        with pytest.raises(InvalidInput, match=message):
            open_artifact(path)


_RACE = """
import sys, time
from pathlib import Path
from edgekit.common import staging
from edgekit.errors import InvalidInput
folder, me, other = Path(sys.argv[1]), *sys.argv[2:]
def meet(path):
    (folder / f"{race}-{me}").touch()
    while not (folder / f"{race}-{other}").exists():
        time.sleep(0)
    return 1 << 40
staging.free_bytes = meet  # between the first look for others and the new folder
for race in range(20):
    try:
        staging.staging_for(folder / f"out-{race}", 0)
        print("began")
    except InvalidInput as error:
        assert "is writing it now" in str(error), error
        print("refused")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="locks of folders")
def test_of_two_that_write_one_output_at_once_one_is_refused_at_the_start(tmp_path: Path) -> None:
    runs = [
        subprocess.Popen([sys.executable, "-c", _RACE, tmp_path, *names], stdout=subprocess.PIPE, text=True)
        for names in ("ab", "ba")
    ]
    said = [run.communicate(timeout=120)[0].split() for run in runs]
    assert [sorted(pair) for pair in zip(*said, strict=True)] == [["began", "refused"]] * 20
