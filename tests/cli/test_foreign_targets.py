"""A defect in a target of another package ends a command in one line that names the target."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from edgekit.cli import main
from edgekit.common.log import log

PROFILES = Path(__file__).parents[2] / "examples/write_a_target/edgekit_numpy/profiles"
TARGET = """
from edgekit.testing import FakeTarget

class HalfWritten(FakeTarget):
    def offers(self, model, device):
        raise NotImplementedError("offers() is not written yet")
"""


@pytest.fixture
def half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "half_written-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half-written\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[edgekit.targets]\nnumpy = half_written:HalfWritten\n")
    (tmp_path / "half_written.py").write_text(TARGET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "half_written", raising=False)


@pytest.mark.usefixtures("half_written")
def test_its_errors_are_one_line_and_the_traceback_is_logged(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger=log.name), pytest.raises(SystemExit) as ended:
        main(["plan", "demo", "--device", "numpy-laptop", "--profiles", str(PROFILES)])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "edgekit: target numpy: NotImplementedError: offers() is not written yet; "
        "this is a defect of that target's package; EDGEKIT_LOG=debug shows where\n"
    )
    assert "half_written.py" in caplog.text


def test_a_bug_of_edgekit_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise NotImplementedError("a bug")

    monkeypatch.setattr("edgekit.cli.command.main", broken)
    with pytest.raises(NotImplementedError, match="a bug"):
        main(["doctor"])
