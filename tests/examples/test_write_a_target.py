"""The example target installs as a package, is found by its entry point, and passes the conformance tests."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")  # makes the neutral weights of the test model

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples" / "write_a_target"

pytestmark = [pytest.mark.quantize, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed the package, as into a user's environment."""
    folder = tmp_path_factory.mktemp("third-party")
    copy = shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(folder / "site"), str(copy)], check=True)
    return folder / "site"


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=site.parent,
        # its own cache: weights there would refer to artifacts that other processes cannot read
        env={**os.environ, "PYTHONPATH": paths, "EDGEKIT_HOME": str(site.parent / "home")},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_its_own_tests_pass(site: Path) -> None:
    tests = site.parent / "source" / "tests"
    done = run(site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tests), str(tests))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_the_commands_of_its_readme_run(site: Path) -> None:
    lines = [line for line in (SOURCE / "README.md").read_text().splitlines() if line.startswith("edgekit ")]
    assert [line.split()[1] for line in lines] == ["export", "run"]
    for line in lines:
        done = run(site, "-m", *shlex.split(line))
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    manifest = json.loads((site.parent / "demo-numpy.edgekit" / "manifest.json").read_text())
    assert manifest["plan"]["target"] == "numpy"
    assert "read back bit for bit" in manifest["self_check"]
