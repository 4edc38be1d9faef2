"""The page about environment variables and the code agree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/environment.md").read_text()
SOURCES = [
    path
    for folder in ("edgekit", "targets", "examples/runner")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cpp", ".h")
]


def test_every_variable_of_the_code_is_on_the_page_and_no_other() -> None:
    in_code = {name for path in SOURCES for name in re.findall(r"\bEDGEKIT_[A-Z_]+", path.read_text())}
    macros = {name for path in SOURCES for name in re.findall(r"#define (EDGEKIT_[A-Z_]+)", path.read_text())}
    assert set(re.findall(r"EDGEKIT_[A-Z_]+", PAGE)) == in_code - macros


def test_every_folder_below_home_is_on_the_page() -> None:
    folders = {
        name
        for path in SOURCES
        for name in re.findall(r'\b(?:home\(\) / |bounded_store\()"([a-z][^"]*)"', path.read_text())
    }
    assert len(folders) >= 8
    tests_only = {"real-models"}
    assert {name for name in folders - tests_only if f"`{name}/`" not in PAGE and f"`{name}`" not in PAGE} == set()
