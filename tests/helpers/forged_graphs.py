"""Graphs that the exporter would not write, as an attacker could; Python and the native library refuse them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

Graph = Any
Change = Callable[[Graph, Path], None]
CANARY = b"the canary's bytes" * 4096


def rewrite(files: Path, change: Change, name: str = "body-0-1.onnx") -> None:
    """Change a graph, as an attacker could who seals the artifact again."""
    path = files / name
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
