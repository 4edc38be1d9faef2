"""A graph is refused before onnxruntime reads it, unless the exporter could have written it for the plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

from edgekit_onnx import OnnxTarget, audit, sessions
from edgekit_onnx.export import FAST
from engines import Model, onnx_model
from forged_graphs import ATTACKS, point_at, rewrite

from edgekit.artifact.artifact import open_artifact
from edgekit.errors import DamagedArtifact, EdgekitError, TargetFailed

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return onnx_model("llama", level=FAST, exits=(1,), chunk_tokens=64).sealed(tmp_path_factory.mktemp("sealed"))


@pytest.fixture(autouse=True)
def onnxruntime_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this module may open a session."""

    def opened(*_: object) -> None:
        pytest.fail("onnxruntime was asked to open a bad graph")

    monkeypatch.setattr("edgekit_onnx.loading.open_graph", opened)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_bad_graph_is_refused(sealed: Model, tmp_path: Path, attack: str) -> None:
    files = sealed.copied(tmp_path).files
    rewrite(files, ATTACKS[attack])
    with pytest.raises(DamagedArtifact) as refusal:
        OnnxTarget().open(sealed.plan, files)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 700


def test_a_refusal_leaves_stdout_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("onnxruntime.InferenceSession._create_inference_session", Mock(side_effect=RuntimeError("no")))
    with pytest.raises(TargetFailed):
        sessions.open_session(b"", sessions.PROVIDERS["cpu"], sessions.options(1))
    assert capsys.readouterr().out == ""


def test_truncated_graph_is_refused(sealed: Model, tmp_path: Path) -> None:
    files = sealed.copied(tmp_path).files
    whole = (files / "head.onnx").read_bytes()
    for length in [0, 1, 7, *range(20, len(whole), max(1, len(whole) // 60))]:
        (files / "head.onnx").write_bytes(whole[:length])
        with pytest.raises(EdgekitError):
            audit.audit(sealed.plan, files)


def test_flipped_bits_are_refused_or_harmless(sealed: Model, tmp_path: Path) -> None:
    """Either the graph is refused, or everything that the audit guarantees still holds."""
    import random

    files = sealed.copied(tmp_path).files
    whole = (files / "body-1-3.onnx").read_bytes()
    chance, refused = random.Random(5), 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        (files / "body-1-3.onnx").write_bytes(bytes(damaged))
        try:
            audit.audit(sealed.plan, files)
        except DamagedArtifact:
            refused += 1
    assert refused > 40
    with pytest.raises(DamagedArtifact):  # and the manifest's hash refuses every one of them
        open_artifact(files)


@pytest.mark.parametrize("name", ["weights.bin", "head.onnx"])
@pytest.mark.parametrize("kind", ["symlink", "hard", "missing", "folder", "short"])
def test_links_and_short_files_are_refused(sealed: Model, tmp_path: Path, name: str, kind: str) -> None:
    files = sealed.copied(tmp_path).files
    (files / name).rename(tmp_path / "elsewhere")
    if kind == "symlink":
        (files / name).symlink_to(tmp_path / "elsewhere")
    elif kind == "hard":
        os.link(tmp_path / "elsewhere", files / name)
    elif kind == "folder":
        (files / name).mkdir()
    elif kind == "short":
        (files / name).write_bytes((tmp_path / "elsewhere").read_bytes()[:-1])
    with pytest.raises(DamagedArtifact):
        OnnxTarget().open(sealed.plan, files)


def test_plan_of_another_model_is_refused(sealed: Model, tmp_path: Path) -> None:
    files = sealed.copied(tmp_path).files
    for change in ({"vocab_size": 161}, {"hidden_size": 128}, {"layers": sealed.plan.model.layers[:2]}):
        plan = sealed.plan.model_copy(update={"model": sealed.plan.model.model_copy(update=change)})
        with pytest.raises(DamagedArtifact):
            OnnxTarget().open(plan, files)


def test_audited_bytes_are_opened(sealed: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is replaced between the audit and the opening is not run."""
    files = sealed.copied(tmp_path).files
    real, opened = sessions.open_graph, []

    def watch(folder: Path, graph: Any, provider: Any, chosen: Any) -> Any:
        for name in ("body-0-1.onnx", "body-1-3.onnx", "head.onnx"):
            (files / name).write_bytes(b"replaced")
        opened.append(graph)
        return real(folder, graph, provider, chosen)

    monkeypatch.setenv("EDGEKIT_PACKED", "off")
    monkeypatch.setattr("edgekit_onnx.loading.open_graph", watch)
    OnnxTarget().open(sealed.plan, files).close()
    assert all(isinstance(graph, bytes) for graph in opened)


def test_bytes_that_passed_are_not_parsed_again_and_changed_ones_are(
    sealed: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    files, parsed = sealed.copied(tmp_path).files, []
    check = audit._Graph.check

    def count(graph: Any, data: bytes) -> None:
        parsed.append(graph.place.name)
        check(graph, data)

    monkeypatch.setattr(audit._Graph, "check", count)
    first = audit.audit(sealed.plan, files)
    assert audit.audit(sealed.plan, files) == first and len(parsed) == len(first) == 3
    rewrite(files, point_at("/etc/hostname"))
    for _ in range(2):
        with pytest.raises(DamagedArtifact, match="points at"):
            audit.audit(sealed.plan, files)
    fresh, seen = sealed.copied(tmp_path / "again").files, len(parsed)

    def parsed_for(tokens: int) -> int:
        """Audit for an opening with another capacity and another chunk, and return how many graphs were parsed."""
        storage = sealed.plan.storage.model_copy(update={"capacity_tokens": tokens})
        changed = sealed.plan.model_copy(update={"storage": storage, "chunk_tokens": sealed.plan.chunk_tokens + 1})
        before = len(parsed)
        assert audit.audit(changed, fresh) == first
        return len(parsed) - before

    whole = sealed.plan.storage.capacity_tokens
    assert [parsed_for(tokens) for tokens in (whole // 2, whole // 4, whole)] == [0, 0, 0] and len(parsed) == seen
    with pytest.raises(DamagedArtifact, match="rotary table"):
        parsed_for(2 * whole)
