"""A defect in a target of another package ends a command in one line that names the target."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from entry_points import declare

from edgekit.apps.delivery.signing import check_required_signature
from edgekit.cli import main
from edgekit.common.log import log
from edgekit.errors import TargetMissing
from edgekit.plugins import SIGNATURES, load_own, load_target

PROFILES = Path(__file__).parents[2] / "examples/write_a_target/edgekit_numpy/profiles"
TARGET = """
from edgekit.testing import FakeTarget

class HalfWritten(FakeTarget):
    def offers(self, model, device):
        raise NotImplementedError("offers() is not written yet")
"""


@pytest.fixture
def half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_written.py").write_text(TARGET)
    declare(tmp_path, {"edgekit.targets": {"numpy": "half_written:HalfWritten"}}, monkeypatch)
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


def test_the_check_of_signatures_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(tmp_path, {SIGNATURES: {"model_signing": "builtins:print"}}, monkeypatch)
    assert load_own(SIGNATURES) is check_required_signature


def test_a_target_without_a_method_is_refused_by_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_open.py").write_text("from edgekit.contracts.target import Target\nclass NoOpen(Target): ...\n")
    declare(tmp_path, {"edgekit.targets": {"empty": "no_open:NoOpen"}}, monkeypatch)
    with pytest.raises(TargetMissing, match=r"target empty \(no_open:NoOpen\) cannot be loaded: .*offer.*reinstall"):
        load_target("empty")
