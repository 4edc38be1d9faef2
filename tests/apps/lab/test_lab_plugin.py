"""The pytest plugin for on-device tests, in a separate pytest process."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from measured import fake, install_fake

TESTS = """
import pytest

@pytest.mark.edgekit_device("here")
def test_on_a_device(device):
    assert device.name == "here" and device.profile.name == "raspberry-pi-5-8gb"
    assert device.measure("one", "quick", timeout_s=120).cases[0].case

@pytest.mark.edgekit_device("nowhere")
def test_on_a_device_that_is_not_there(device):
    pass

def test_without_a_mark(device):
    pass
"""
LAB = """
name: ours
devices:
  - {name: here, kind: local, profile: raspberry-pi-5-8gb, options: {repeats: 1, loads: 1}}
artifacts: [one]
workloads: [quick]
"""


def pytest_in(folder: Path, *arguments: str) -> str:
    installed = [entry for entry in entry_points(group="pytest11") if entry.value == "edgekit.apps.lab.pytest_plugin"]
    plugin = [] if installed else ["-p", "edgekit.apps.lab.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", *plugin, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180).stdout


@pytest.mark.slow
def test_a_mark_names_the_device_and_the_fixture_measures_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake(tmp_path / "site", monkeypatch)
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    fake(tmp_path / "one")
    (tmp_path / "test_ours.py").write_text(TESTS)
    (tmp_path / "lab.yaml").write_text(LAB)
    told = pytest_in(tmp_path, "--edgekit-lab", "lab.yaml", "--strict-markers")
    assert "1 passed, 2 errors" in told, told
    assert "no device 'nowhere'; it has here" in told and "needs to know which" in told
    assert "1 skipped" in (told := pytest_in(tmp_path, "-k", "on_a_device and not there")), told
    assert "--edgekit-lab lab.yaml" in told
