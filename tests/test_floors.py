"""A room imports only from lower floors; only targets and quantisers name vendor libraries."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS: dict[str, int] = {
    "errors": 0, "frozen": 0, "units": 0, "files": 0, "heap": 0, "installed": 0,
    "reading": 1, "model": 1, "families": 1, "rope": 1, "device": 1, "recipe": 1, "cache": 1,
    "plan": 2, "memory": 2, "speed": 2, "quality": 2,
    "interfaces": 3, "plugins": 3, "artifact": 3, "facts": 3, "store": 3, "source": 3, "profiles": 3, "detect": 3,
    "quality_facts": 3, "segments": 3, "holding": 3, "rotation": 3, "adapters": 3, "weights": 3,
    "resolve": 4, "runtime": 4,
    "measure": 5,
    "export": 6, "self_check": 6, "planning": 6, "sweep": 6, "cluster": 6, "doctor": 6, "testing": 6, "lab": 6,
    "optimum": 7,  # the registration of a command with optimum's own command line
    "cli": 7, "__main__": 7,
}  # fmt: skip
TARGET_FLOOR = 3
PURE = {"socket", "time", "requests", "urllib", "subprocess", "huggingface_hub"}
VENDORS = {
    "torch",
    "transformers",
    "onnxruntime",
    "onnx",
    "onnx_ir",
    "mlx",
    "mlx_lm",
    "executorch",
    "torchao",
    "optimum",
}


def rooms() -> Iterator[tuple[Path, str]]:
    """Every module with the room that it belongs to; targets are rooms of their own."""
    for path in sorted((ROOT / "edgekit").rglob("*.py")):
        yield path, path.relative_to(ROOT / "edgekit").parts[0].removesuffix(".py")
    for path in sorted((ROOT / "targets").rglob("*.py")):
        yield path, path.relative_to(ROOT / "targets").parts[0]


def imports(path: Path, *, only_at_import: bool = False) -> Iterator[tuple[int, str]]:
    """Every absolute import as `package.module`, with its line."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if only_at_import else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize(("path", "room"), list(rooms()), ids=lambda value: getattr(value, "stem", value))
def test_a_room_imports_only_from_lower_floors(path: Path, room: str) -> None:
    if path == ROOT / "edgekit/__init__.py":
        return  # the face, which loads everything else lazily
    floor = FLOORS.get(room, TARGET_FLOOR)
    for line, name in imports(path):
        head, _, rest = name.partition(".")
        if head == "edgekit" and rest.partition(".")[0] in FLOORS:
            other = rest.partition(".")[0]
            allowed = other == room or FLOORS[other] < floor or (room not in FLOORS and FLOORS[other] <= TARGET_FLOOR)
            same_level = FLOORS[other] == floor and room in FLOORS
            assert allowed or same_level, f"{path}:{line}: {room} ({floor}) imports {other} ({FLOORS[other]})"
        assert not head.startswith("edgekit_") or head == room, f"{path}:{line}: nobody imports a target by name"


@pytest.mark.parametrize(("path", "room"), list(rooms()), ids=lambda value: getattr(value, "stem", value))
def test_every_room_has_a_floor(path: Path, room: str) -> None:
    assert path == ROOT / "edgekit/__init__.py" or room in FLOORS or room.startswith("edgekit_"), f"{room} has no floor"


@pytest.mark.parametrize(("path", "room"), list(rooms()), ids=lambda value: getattr(value, "stem", value))
def test_floors_zero_to_two_touch_no_network_clock_or_vendor_library(path: Path, room: str) -> None:
    if FLOORS.get(room, 9) > 2:
        return
    found = {(line, name.partition(".")[0]) for line, name in imports(path)}
    assert not [(line, name) for line, name in found if name in PURE | VENDORS], path


def test_no_room_is_larger_than_it_reads() -> None:
    long = {str(path): len(path.read_text().splitlines()) for path, _ in rooms()}
    assert {name: lines for name, lines in long.items() if lines > 400} == {}
