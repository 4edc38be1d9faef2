"""Every Python block of the documentation, page by page, as a user's script under `mypy --strict`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
# Pages whose blocks are fragments of edgekit itself and no scripts.
NO_SCRIPTS = {"architecture.md"}


def scripts() -> dict[str, str]:
    """The blocks of each page as one script, in their order."""
    blocks = {
        page.stem.lower(): re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        for page in PAGES
        if page.name not in NO_SCRIPTS
    }
    return {name: "\n".join(found) for name, found in blocks.items() if found}


@pytest.mark.slow
def test_every_page_is_a_typed_script(tmp_path: Path) -> None:
    found = scripts()
    assert {"runtime", "chat", "python", "tutorial"} <= set(found)
    for name, text in found.items():
        (tmp_path / f"{name}_page.py").write_text(text)
    environment = {
        **os.environ,
        "MYPYPATH": os.pathsep.join(map(str, (ROOT, ROOT / "targets", ROOT / "examples/write_a_target"))),
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--follow-imports=silent",
            "--no-error-summary",
            *found_files(tmp_path),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def found_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*_page.py"))
