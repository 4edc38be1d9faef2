"""Pages refer only to existing code and tests, and no page exceeds its maximum length."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOST_WORDS = 2_100  # on their way down to 900


def test_the_architecture_page_names_code_that_exists() -> None:
    page = (DOCS / "architecture.md").read_text()
    table = page.split("## Folders")[0]
    for path in re.findall(r"`((?:edgekit|examples|tests)/[\w/]+(?:\.py|/))`", page):
        assert (ROOT / path).exists(), path
    places = re.findall(r"`([\w.]+)` in\s+`(edgekit/[\w/]+\.py)`", table)
    assert len(places) >= 5
    for name, path in places:
        for part in name.removeprefix("edgekit.").split("."):
            assert re.search(rf"(?:def|class) {part}\b", (ROOT / path).read_text()), f"{path} has no {part}"


def test_the_architecture_page_lists_every_folder() -> None:
    folders = {path.name for path in (ROOT / "edgekit").iterdir() if (path / "__init__.py").exists()}
    listed = (DOCS / "architecture.md").read_text().split("```text")[1].split("```")[0]
    assert {name for name in folders if f"{name}/" not in listed} == {"_demo"} & folders


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: path.relative_to(DOCS).as_posix())
def test_a_page_is_short_enough_to_read(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "reference.html").read_text()
    for name in ("open_runtime", "AsyncRuntime", "check_engine", "ContextExceeded"):
        assert name in reference
