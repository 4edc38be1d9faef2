"""Write `docs/tutorial.ipynb` from `docs/tutorial.md`, and run the code cells of a notebook without Jupyter.

python tests/helpers/notebook.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"```(console|python|sh)\n(.*?)```\n", re.DOTALL)


def notebook(page: str) -> dict[str, Any]:
    """A page as a notebook: text and output as Markdown, commands and Python as code."""
    cells, place = [], 0
    for block in _BLOCK.finditer(page):
        cells += _markdown(page[place : block.start()])
        cells.append(_cell("code", _code(block[1], block[2])))
        place = block.end()
    cells += _markdown(page[place:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _code(kind: str, text: str) -> str:
    if kind == "python":
        return f"%%writefile app.py\n{text}"
    lines = [line.removeprefix("$ ") for line in text.splitlines()]
    if kind == "sh":  # a notebook has its own environment
        return "\n".join(f"%{line}" if line.startswith("pip ") else f"!{line}" for line in lines if "venv" not in line)
    return "\n".join(f"!{line}" for line in lines)


def _markdown(text: str) -> list[dict[str, Any]]:
    stripped = text.strip()
    return [_cell("markdown", stripped)] if stripped else []


def _cell(kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": text.rstrip("\n").splitlines(keepends=True)}
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def run(cells: list[dict[str, Any]], folder: Path, changed: Callable[[str], str]) -> str:
    """Run the code cells in order in `folder`, `changed` applied to each; return what they printed.

    `%%writefile` and `!` do as in Jupyter; `%pip` is left out, since what it installs is here.
    """
    printed = ""
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        text = changed("".join(cell["source"]))
        if text.startswith("%%writefile "):
            name, _, body = text.removeprefix("%%writefile ").partition("\n")
            (folder / name).write_text(body)
            continue
        for line in text.splitlines():
            if line.startswith("%pip "):
                continue
            assert line.startswith("!"), line
            command = re.sub(r"^(edgekit|python)\b", lambda word: _PROGRAMS[word[0]], line.removeprefix("!"))
            done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=1500)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            printed += done.stdout
    return printed


_PROGRAMS = {"edgekit": f"{sys.executable} -m edgekit", "python": sys.executable}


if __name__ == "__main__":
    made = notebook((DOCS / "tutorial.md").read_text())
    (DOCS / "tutorial.ipynb").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")
