"""After an export the store refers to the artifact, and gives the same weights as before."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import tiny_models
from click.testing import CliRunner

import edgekit
from edgekit.artifact import rebuilding
from edgekit.artifact.artifact import Artifact, open_artifact
from edgekit.artifact.export import export
from edgekit.cli import command
from edgekit.common.content_store import IN_USE
from edgekit.contracts.neutral import NeutralWeights, weights_store
from edgekit.contracts.weights_reference import read_reference, reference_place
from edgekit.errors import InvalidInput
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest, find_recipe
from edgekit.plugins import load_target
from edgekit.quant import pipeline
from edgekit.quant.effort import Effort
from edgekit.quant.pipeline import are_kept, neutral_weights

pytestmark = pytest.mark.quantize

EACH = [
    pytest.param(target, recipe, marks=getattr(pytest.mark, target))
    for target in ("onnx", "mlx", "llamacpp")
    for recipe in ("s4-g32", "balanced", "s8")
] + [pytest.param("executorch", "s4-g32", marks=[pytest.mark.executorch, pytest.mark.slow])]
ONNX = pytest.mark.onnx


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_tiny(tmp_path_factory.mktemp("model") / "tiny")


def exported(model: Path, place: Path, target: str = "onnx", recipe: str = "s4-g32", context: int = 256) -> Artifact:
    """An export as an app calls it, which ends with a reference."""
    found = load_target(target)
    missing = found.missing_to_export()
    if missing:
        pytest.skip(missing)
    effort: Effort | None = None if recipe == "float32" else "quick"
    made = edgekit.export(
        str(model), place, tiny_models.DEVICE, target=target, recipe=recipe, context=context, effort=effort
    )
    assert isinstance(made, Artifact)
    return made


def stored(model: Path, say: Callable[[str], None], recipe: str = "s4-g32") -> NeutralWeights:
    return neutral_weights(
        open_source(str(model), need_weights=True), find_recipe(recipe), rebuild=rebuilding.rebuilding(say)
    )


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refuse(*_: object) -> None:
    raise AssertionError("the weights were quantised again")


def folders(home: Path) -> list[Path]:
    return [path for path in (home / "weights").iterdir() if not path.name.startswith(".")]


@pytest.mark.parametrize(("target", "recipe"), EACH)
def test_weights_come_back_from_an_artifact_byte_by_byte(
    target: str, recipe: str, model: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored(model, refuse, recipe)
    files, folder = bytes_of(before.folder), before.folder
    del before
    exported(model, tmp_path / "out", target, recipe)
    (reference,) = folders(home)
    assert reference != folder, "the copy was freed"
    integers = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    assert sum(path.stat().st_size for path in (reference / "rest").glob("*.safetensors")) < integers / 2
    assert are_kept(open_source(str(model), need_weights=True), find_recipe(recipe))
    monkeypatch.setattr(pipeline, "_quantise", refuse)
    assert bytes_of(stored(model, refuse, recipe).folder) == files


@ONNX
def test_a_second_export_gives_the_artifact_that_whole_weights_give(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plan,) = make_plans(
        str(model), [tiny_models.DEVICE], PlanRequest(recipe=find_recipe("s4-g32"), target="onnx", context=128)
    )
    whole = export(plan, tmp_path / "whole", store=weights_store(tmp_path / "other"))
    exported(model, tmp_path / "out")
    monkeypatch.setattr(pipeline, "_quantise", refuse)
    assert exported(model, tmp_path / "again", context=128).sha256 == whole.sha256


def damage(folder: Path) -> None:
    path = max(folder.iterdir(), key=lambda each: each.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("another"), folder)


@ONNX
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (shutil.rmtree, "does not exist"),
        (lambda folder: folder.rename(folder.with_name("moved")), "does not exist"),
        (damage, "not those that were sealed"),
        (replace, "is another artifact now"),
    ],
    ids=["deleted", "moved", "damaged", "replaced"],
)
def test_without_the_artifact_weights_are_quantised_again_and_one_line_says_so(
    change: Callable[[Path], None],
    reason: str,
    model: Path,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = stored(model, refuse)
    files = bytes_of(before.folder)
    del before
    if change is replace:
        exported(model, tmp_path / "another", recipe="s8")
    exported(model, tmp_path / "out")
    change(tmp_path / "out")
    said: list[str] = []
    with monkeypatch.context() as interrupted:
        interrupted.setattr(TensorWriter, "seal", stopping(after=2))
        with pytest.raises(KeyboardInterrupt):
            stored(model, said.append)
    (partial,) = (home / "weights").glob(".*.part")
    made = {path.name: path.stat().st_ino for path in partial.glob("*.safetensors")}
    weights = stored(model, said.append)
    assert bytes_of(weights.folder) == files
    assert len(made) == 2 and all((weights.folder / name).stat().st_ino == made[name] for name in made), "continued"
    (line,) = set(said)
    assert "quantising again" in line and reason in line and "\n" not in line


@ONNX
def test_an_app_finds_that_line_in_its_log(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(exported(model, tmp_path / "out").folder)
    exported(model, tmp_path / "out")
    assert "quantising again" in caplog.text


@ONNX
def test_an_interruption_leaves_whole_weights_or_a_reference(
    model: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = open_artifact(tiny_models.artifact_of(model, tmp_path / "out"))
    before = stored(model, refuse)
    files, sha256 = bytes_of(before.folder), before.sha256
    del before
    with monkeypatch.context() as interrupted:
        interrupted.setattr(rebuilding.TensorWriter, "seal", stopping(after=0))
        with pytest.raises(KeyboardInterrupt):
            rebuilding.free_copies([artifact], weights_store(), print)
    weights = rebuilding.stored_weights(weights_store(), sha256, refuse)
    assert weights is not None and bytes_of(weights.folder) == files, "whole: the reference was not complete"
    del weights
    rebuilding.free_copies([artifact], weights_store(), print)
    assert len(folders(home)) == 1
    with monkeypatch.context() as interrupted:
        interrupted.setattr(rebuilding.TensorWriter, "seal", stopping(after=2))
        with pytest.raises(KeyboardInterrupt):
            stored(model, refuse)
    assert len(folders(home)) == 1, "a reference: the weights were not complete"
    monkeypatch.setattr(pipeline, "_quantise", refuse)
    assert bytes_of(stored(model, refuse).folder) == files


@ONNX
def test_a_killed_rebuild_whose_reference_is_gone_hinders_nothing(
    model: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored(model, refuse)
    files = bytes_of(before.folder)
    del before
    exported(model, tmp_path / "out")
    (reference,) = folders(home)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        killed.setattr(rebuilding.TensorWriter, "seal", stopping(after=2))
        with pytest.raises(KeyboardInterrupt):
            stored(model, refuse)
    shutil.rmtree(reference)
    assert list((home / "weights").glob(".*.part/.rebuilt/*.safetensors"))
    assert bytes_of(stored(model, refuse).folder) == files


@ONNX
def test_weights_that_a_killed_process_was_dropping_hinder_nothing(model: Path, tmp_path: Path, home: Path) -> None:
    folder = stored(model, refuse).folder
    folder.rename(folder.with_name(f".{folder.name}.gone"))
    exported(model, tmp_path / "out")
    shutil.copytree(stored(model, refuse).folder, folder.with_name(f".{folder.name}.gone"))
    exported(model, tmp_path / "again")
    assert [path.name for path in folders(home)] == [reference_place(weights_store(), folder.name).name]


@ONNX
def test_a_copy_that_cannot_be_freed_fails_no_export(
    model: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no text")

    monkeypatch.setattr(rebuilding, "to_sealed_json", fails)
    assert exported(model, tmp_path / "out").sha256
    (whole,) = folders(home)
    assert (whole / "edgekit.json").is_file() and not list((home / "weights").glob("*.part"))


@ONNX
def test_an_output_that_is_no_text_is_refused_before_work(model: Path, tmp_path: Path, home: Path) -> None:
    with pytest.raises(InvalidInput, match=r"out\\udcff': is no text in UTF-8; choose another path"):
        exported(model, tmp_path / "out\udcff")
    assert not home.exists() or not folders(home)


@ONNX
def test_an_error_of_the_disk_keeps_the_reference(
    model: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(model, tmp_path / "out")
    (reference,) = folders(home)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(rebuilding, "copy_file", fails)
        with pytest.raises(InvalidInput, match=r"cannot be rebuilt: Input/output error; try again, or .*store prune"):
            stored(model, refuse)
    assert folders(home) == [reference]
    monkeypatch.setattr(pipeline, "_quantise", refuse)
    assert stored(model, refuse).sha256


@ONNX
def test_two_exports_at_once_never_lose_both(
    model: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = open_artifact(tiny_models.artifact_of(model, tmp_path / "out"))
    stored(model, refuse)
    is_neutral = rebuilding.is_neutral

    def after_the_other(folder: Path) -> bool:
        found = is_neutral(folder)
        with monkeypatch.context() as once:
            once.setattr(rebuilding, "is_neutral", is_neutral)
            rebuilding.free_copies([artifact], weights_store(), print)
        return found

    monkeypatch.setattr(rebuilding, "is_neutral", after_the_other)
    rebuilding.free_copies([artifact], weights_store(), print)
    (reference,) = folders(home)
    assert (reference / "reference.json").is_file()


@ONNX
@pytest.mark.parametrize("kind", ["pipe", "a link to zeros", "no text"])
def test_a_reference_to_no_file_is_gone(kind: str, model: Path, tmp_path: Path, home: Path) -> None:
    folder = exported(model, tmp_path / "out").folder
    reference = read_reference(folders(home)[0])
    manifest = folder / "manifest.json"
    manifest.unlink()
    if kind == "pipe":
        os.mkfifo(manifest)
    elif kind == "no text":
        reference = reference.model_copy(update={"artifact": "\0"})
    else:
        manifest.symlink_to("/dev/zero")
    assert not reference.is_there


def stopping(after: int) -> Callable[[TensorWriter], None]:
    seal, calls = TensorWriter.seal, iter(range(1000))

    def stop(writer: TensorWriter) -> None:
        if next(calls) >= after:
            raise KeyboardInterrupt
        seal(writer)

    return stop


@ONNX
def test_weights_in_use_stay_whole(model: Path, tmp_path: Path) -> None:
    used = stored(model, refuse)
    artifact = exported(model, tmp_path / "out")
    assert weights_store().drop(used.folder) == IN_USE and used.folder.is_dir()
    folder = used.folder
    del used
    rebuilding.free_copies([artifact], weights_store(), print)
    assert not folder.exists()


@ONNX
def test_weights_that_the_user_asked_for_are_not_touched(model: Path, tmp_path: Path, home: Path) -> None:
    edgekit.quantize(str(model), "s4-g32", tmp_path / "own", effort="quick")
    before = bytes_of(tmp_path / "own")
    edgekit.export(str(tmp_path / "own"), tmp_path / "out", tiny_models.DEVICE, target="onnx", context=256)
    assert bytes_of(tmp_path / "own") == before
    assert not [path for path in folders(home) if (path / "edgekit.json").exists()], "the store's copy is freed"
    shutil.rmtree(tmp_path / "out")
    assert NeutralWeights.open(tmp_path / "own", verify=True).sha256


@ONNX
def test_float_weights_are_not_kept(model: Path, tmp_path: Path, home: Path) -> None:
    exported(model, tmp_path / "out", recipe="float32")
    assert not folders(home)


@ONNX
def test_the_store_names_the_artifact(model: Path, tmp_path: Path) -> None:
    def listed() -> Iterator[str]:
        lines = CliRunner().invoke(command, ["store", "ls", "--json"]).stdout.splitlines()
        return (each["holds"] for each in map(json.loads, lines) if each["kind"] == "weights")

    arguments = ["--device", "this-cpu", "--target", "onnx", "--context", "256", "--effort", "quick"]
    done = CliRunner().invoke(
        command, ["export", str(model), *arguments, "--recipe", "s8", "-o", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    assert "of the cache freed" in done.stderr
    assert list(listed()) == [f"tiny s8 rtn, in {tmp_path / 'out'}"]
    shutil.rmtree(tmp_path / "out")
    assert list(listed()) == [f"tiny s8 rtn, {tmp_path / 'out'} is gone"]
