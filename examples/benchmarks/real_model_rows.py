"""Rows of the tables of real models: what was asked of an export, what was measured, and the file that holds them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edgekit.contracts.recipe import GGUF_RECIPES, NATIVE_RECIPES, RECIPES

Row = dict[str, Any]

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data" / "real_models.jsonl"
MODELS = ("smollm2", "gemma3", "demo")
# Targets, and a device for which a plan chooses each. llamacpp is chosen only where it is measured to be the fastest,
# so it is asked for.
TARGETS = {"onnx": "laptop-x86-8gb", "llamacpp": "this", "executorch": "pixel-9", "mlx": "macbook-m4-16gb"}
DEFAULT = "default"
NAMES = [DEFAULT, *RECIPES, *GGUF_RECIPES, *NATIVE_RECIPES]
KINDS = ("code", "prose")
ASKED = ("model", "target", "recipe", "effort")  # what tells rows apart


def read_rows(data: Path) -> dict[tuple[str, ...], Row]:
    """Rows by what was asked; a later line of the same row takes the place of an earlier one."""
    lines = data.read_text().splitlines() if data.exists() else []
    return {tuple(row[key] for key in ASKED): row for row in map(json.loads, lines)}


def add_row(row: Row, data: Path) -> None:
    """Append a row as one line, so that several runs may add rows at the same time."""
    with data.open("a") as file:
        file.write(json.dumps(row) + "\n")


def written(rows: Iterable[Row]) -> bytes:
    """The file's bytes, in the order of the tables."""
    return "".join(json.dumps(row) + "\n" for row in sorted(rows, key=place)).encode()


def place(row: Row) -> tuple[int, int, int, str]:
    """The place of a row in the tables."""
    where = MODELS.index(row["model"]), list(TARGETS).index(row["target"]), NAMES.index(row["recipe"])
    return (*where, row["effort"])
