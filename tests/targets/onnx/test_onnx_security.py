"""A graph is refused before onnxruntime reads it, unless the exporter could have written it for the plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

import numpy as np
import onnx
from edgekit_onnx import OnnxTarget, audit, sessions
from edgekit_onnx.export import FAST
from engines import Model, onnx_model

from edgekit.artifact.artifact import open_artifact
from edgekit.errors import DamagedArtifact, EdgekitError, TargetFailed

pytestmark = [pytest.mark.onnx, pytest.mark.quantize]

Graph = Any
Change = Callable[[Graph, Path], None]
CANARY = b"the canary's bytes" * 4096


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return onnx_model("llama", level=FAST, exits=(1,), chunk_tokens=64).sealed(tmp_path_factory.mktemp("sealed"))


@pytest.fixture(autouse=True)
def onnxruntime_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this module may open a session."""

    def opened(*_: object) -> None:
        pytest.fail("onnxruntime was asked to open a bad graph")

    monkeypatch.setattr("edgekit_onnx.loading.open_graph", opened)


def rewrite(files: Path, change: Change) -> None:
    """Change a graph and seal the artifact again, as an attacker could."""
    path = files / "body-0-1.onnx"
    model = onnx.load_model(path, load_external_data=False)
    change(model, files)
    path.write_bytes(model.SerializeToString())


def external(graph: Graph) -> Any:
    """The largest external tensor's entries."""
    return next(tensor for tensor in graph.graph.initializer if tensor.name.endswith("gate_proj.weight"))


def point_at(location: str, *, link: str | None = None) -> Change:
    def change(model: Graph, files: Path) -> None:
        canary = files.parent / "canary.bin"
        canary.write_bytes(CANARY)
        if link == "symlink":
            (files / location).symlink_to(canary)
        if link == "folder":
            (files / location.split("/")[0]).symlink_to(files.parent)
        if link == "hard":
            os.link(canary, files / location)
        for entry in external(model).external_data:
            if entry.key == "location":
                entry.value = location.replace("CANARY", str(canary))

    return change


def say(key: str, value: str, *, more: bool = False) -> Change:
    """Change a field of an external tensor's data, or give it one `more`."""

    def change(model: Graph, files: Path) -> None:
        fields = external(model).external_data
        for field in [fields.add()] if more else [each for each in fields if each.key == key]:
            field.key, field.value = key, value

    return change


def dims(*sizes: int) -> Change:
    def change(model: Graph, files: Path) -> None:
        del external(model).dims[:]
        external(model).dims.extend(sizes)

    return change


def bomb(model: Graph, files: Path) -> None:
    repeats = onnx.helper.make_tensor("repeats", onnx.TensorProto.INT64, [1], [1 << 40])
    model.graph.initializer.append(repeats)
    model.graph.node.append(onnx.helper.make_node("Tile", ["input_ids", "repeats"], ["huge"]))


def computed(*lines: str) -> Change:
    shapes = {"wide": [512, 1, 1], "high": [1, 512, 1], "deep": [1, 1, 512], "far": [], "zero": [], "one": []}

    def change(model: Graph, files: Path) -> None:
        for name, shape in shapes.items():
            data = np.full(shape, {"far": 1 << 40, "zero": 0}.get(name, 1))
            model.graph.initializer.append(onnx.numpy_helper.from_array(data, name))
        for made, _, kind, *operands in map(str.split, lines):
            model.graph.node.append(onnx.helper.make_node(kind, operands, [made]))

    return change


def subgraph(model: Graph, files: Path) -> None:
    branch = onnx.helper.make_graph([], "branch", [], [])
    model.graph.node.append(onnx.helper.make_node("If", ["total"], [], then_branch=branch, else_branch=branch))


def attribute(kind: str, name: str, value: int) -> Change:
    def change(model: Graph, files: Path) -> None:
        node = next(node for node in model.graph.node if node.op_type == kind)
        for item in node.attribute:
            if item.name == name:
                item.i = value

    return change


def short_table(model: Graph, files: Path) -> None:
    for tensor in model.graph.initializer:
        if tensor.name.startswith("rope."):
            tensor.dims[0] = 16
            for item in tensor.external_data:
                if item.key == "length":
                    item.value = str(16 * tensor.dims[1] * 4)


def other_cache(model: Graph, files: Path) -> None:
    for value in [*model.graph.input, *model.graph.output]:
        if "key" in value.name:
            value.type.tensor_type.shape.dim[3].dim_value = 4096


def many_nodes(model: Graph, files: Path) -> None:
    model.graph.node.extend([onnx.helper.make_node("Add", ["a", "b"], [f"c{index}"]) for index in range(200)])


def twice(model: Graph, files: Path) -> None:
    model.graph.initializer.append(model.graph.initializer[0])


ATTACKS: dict[str, Change] = {
    "a path upwards": point_at("../canary.bin"),
    "a path upwards in the middle": point_at("a/../../canary.bin"),
    "a path behind a fragment": point_at("#../canary.bin"),
    "an absolute path": point_at("CANARY"),
    "a symbolic link": point_at("link.bin", link="symlink"),
    "a folder that is a link": point_at("folder/canary.bin", link="folder"),
    "a hard link": point_at("hard.bin", link="hard"),
    "a nul in the path": point_at("weights.bin\0../canary.bin"),
    "a negative offset": say("offset", "-8"),
    "an offset past the end": say("offset", str(1 << 40)),
    "an offset of another script's digits": say("offset", "٣"),
    "an offset of a million digits": say("offset", "9" * 1_000_000),
    "a length that is not the shape's": say("length", "64"),
    "an injected attribute": say("prepacked_0", "key|0;64", more=True),
    "a checksum that nobody checks": say("checksum", "00", more=True),
    "the location twice": say("location", "/etc/passwd", more=True),
    "an oversized shape": dims(1 << 40, 2, 16),
    "a shape that overflows 64 bits": dims(1 << 33, 1 << 33, 1 << 33),
    "a negative dimension": dims(-1, 2, 16),
    "more dimensions than any weight": dims(1, 1, 1, 128, 2, 16),
    "a bomb of few bytes": bomb,
    "a range of numbers": computed("n = Mul far one", "y = Range zero n one"),
    "constants along several axes": computed("x = Add wide high", "y = Add x deep"),
    "a shape along several axes": computed("s = Shape input_ids", "x = Add s wide", "y = Add x high"),
    "scales that are not one of each row": computed("x = Expand wide far"),
    "many copies of the weights": computed(*(f"x{index} = Neg embedding.weight" for index in range(60))),
    "nodes out of order": computed("y = Add x one", "x = Neg wide"),
    "a graph in a graph": subgraph,
    "operators of another domain": lambda model, _: setattr(model.opset_import.add(), "domain", "evil.example"),
    "a product that claims more outputs": attribute("MatMulNBits", "N", 1 << 20),
    "a product that claims more inputs": attribute("MatMulNBits", "K", 1 << 20),
    "a product of one bit": attribute("MatMulNBits", "bits", 1),
    "a lookup of other blocks": attribute("GatherBlockQuantized", "block_size", 16),
    "a rotary table that is too short": short_table,
    "keys of another shape": other_cache,
    "more nodes than layers need": many_nodes,
    "a tensor that stands twice": twice,
}


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
