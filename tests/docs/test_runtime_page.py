"""Every code block of the runtime pages runs, in order, and every option is documented there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_artifacts import install, make_artifact

from edgekit.runtime.options import Options

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / name).read_text() for name in ("runtime.md", "chat.md", "serving.md", "evaluation.md")}


@pytest.mark.parametrize("name", PAGES)
def test_every_block_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "my-artifact")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGES[name], re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"docs/{name}", "exec"), names)
    shown = capsys.readouterr().out
    for expected in re.findall(r"print\(.*\)  # (.*: .*)$", PAGES[name], re.MULTILINE):
        assert expected in shown


def test_every_option_is_on_the_page() -> None:
    assert [name for name in Options.__annotations__ if f"`{name}`" not in "".join(PAGES.values())] == []
