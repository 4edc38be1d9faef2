"""The script that tests arm64 under emulation says where it cannot run, and judges what it measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import arm64
import numpy as np
import pytest


def test_script_says_why_it_cannot_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, arm64.__file__, "--folder", str(tmp_path / "arm64")],
        env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == arm64.COULD_NOT_RUN, done.stderr
    assert done.stdout.startswith("arm64 was not tested: ") and done.stdout.count("\n") == 1


@pytest.mark.parametrize("wrong", [0.011, float("nan")])
def test_only_distances_within_the_bounds_pass(wrong: float) -> None:
    bounds = arm64.Comparison("demo", (), 1, 1, kl_to_float=0.01, kl_to_x86=0.02)
    arm64.judge(bounds, "max", to_float=0.01, to_x86=0.02)
    with pytest.raises(arm64.Wrong, match="demo on max"):
        arm64.judge(bounds, "max", to_float=wrong, to_x86=0.0)


def test_the_distance_is_that_of_the_files(tmp_path: Path) -> None:
    windows, logits = np.array([[1, 0]]), np.array([[[0.0, 0.0], [0.0, 0.0]]], np.float32)
    for name, shift in (("one", 0.0), ("two", np.log(3.0))):
        np.savez(tmp_path / f"{name}.npz", windows=windows, logits=logits + np.array([0.0, shift], np.float32))
    assert arm64.kl(tmp_path / "one.npz", tmp_path / "one.npz") == 0
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert arm64.kl(tmp_path / "one.npz", tmp_path / "two.npz") == pytest.approx(expected, rel=1e-6)
