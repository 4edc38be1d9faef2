"""Every block of docs/runtime.md runs, in order, as a reader would type it; and it names every option there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_artifacts import install, make_artifact

from edgekit.runtime.options import Options

PAGE = (Path(__file__).parents[1] / "docs/runtime.md").read_text()


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    install(tmp_path / "site", monkeypatch)
    make_artifact(tmp_path / "my-artifact")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 9
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/runtime.md", "exec"), names)
    shown = capsys.readouterr().out
    for expected in re.findall(r"print\(.*\)  # (.*: .*)$", PAGE, re.MULTILINE):
        assert expected in shown


def test_every_option_is_on_the_page() -> None:
    assert [name for name in Options.__annotations__ if f"`{name}`" not in PAGE] == []
