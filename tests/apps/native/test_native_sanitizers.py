"""The suite of the native library, and damaged files, with sanitizers that end the process at the first mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from native_fuzzing import WRITERS, compiled, fuzz

from edgekit.apps.native.build import build, missing

pytestmark = [pytest.mark.onnx, pytest.mark.quantize, pytest.mark.long]
FOLDER, HELPERS = Path(__file__).parent, Path(__file__).parents[2] / "helpers"
DAMAGED_FILES, MORE_DAMAGED_FILES = 3000, 20_000


@pytest.fixture(scope="module")
def environment(demo_artifact: Path, narrow_artifacts: dict[int, Path]) -> dict[str, str]:
    """The sanitizers' library comes before all others, and leaks of Python itself are no matter."""
    reason = missing()
    if reason or sys.platform != "linux":
        pytest.skip(reason or "the sanitizers are loaded as Linux loads them")
    # The sanitizer looks for the function that throws when it is loaded, and Python does not load it.
    preloaded = [file_of("libasan.so"), file_of("libstdc++.so.6")]
    build(sanitize=True)
    return {
        **os.environ,
        "NATIVE_SANITIZE": "1",
        "NATIVE_DEMO": str(demo_artifact),
        **{f"NATIVE_DEMO_{bits}": str(artifact) for bits, artifact in narrow_artifacts.items()},
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:quarantine_size_mb=8",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def file_of(library: str) -> str:
    """The path of a library of the compiler."""
    asked = ["c++", f"-print-file-name={library}"]
    path = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout.strip()
    return path if Path(path).is_absolute() else pytest.skip(f"the compiler has no {library}")


def run(environment: dict[str, str], *arguments: object) -> None:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def test_the_suite_passes_with_sanitizers(environment: dict[str, str]) -> None:
    run(environment, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not long", FOLDER)


@pytest.mark.parametrize("name", ["native-template", "native-manifest", "native-graph"])
def test_damaged_files_are_read_or_refused_with_sanitizers(environment: dict[str, str], name: str) -> None:
    run(environment, HELPERS / "native_formats.py", "--format", name, "--count", DAMAGED_FILES)


@pytest.mark.parametrize("kind", ["tokenizer", "manifest"])
def test_many_damaged_files_are_read_or_refused_with_sanitizers(tmp_path: Path, kind: str) -> None:
    """The loop is a program of its own, into which the sanitizers are linked."""
    if reason := missing():
        pytest.skip(reason)
    counts = fuzz(compiled(sanitize=True), kind, WRITERS[kind](tmp_path), 0, MORE_DAMAGED_FILES)
    assert counts.opened > MORE_DAMAGED_FILES // 50 and counts.refused > MORE_DAMAGED_FILES // 4
    assert counts.reasons > 30
