"""Damaged files, odd places for files and failing system calls: an answer or one line, and nothing partial."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import fuzzing
import pytest
from fake_artifacts import install
from stored_formats import FORMATS

from edgekit.common import files, system
from edgekit.common.files import home, user_profiles
from edgekit.common.sealed_json import read_sealed_json, to_sealed_json
from edgekit.common.staging import staging_for
from edgekit.contracts.manifest import MANIFEST_VERSION, FileFact, Manifest
from edgekit.errors import InvalidInput
from edgekit.planner.make import make_plans

# `make fuzz` has many more. An artifact is opened and answers each time.
COUNTS = {name: 150 for name in FORMATS if name != "gguf"} | {"artifact-onnx": 40, "model-folder": 200}


NEVER_REFUSED = {name for name in FORMATS if name.startswith("fact-")} | {"answer"}  # a damaged fact is made again


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_damaged_files_are_read_or_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch)
    seen = Counter(fuzzing.outcomes(FORMATS[name](tmp_path), COUNTS[name], seed=0, kept=tmp_path))
    assert sum(seen.values()) == COUNTS[name]
    assert seen["read"] > COUNTS[name] // 100, "some changes do no harm"
    assert (sum(seen.values()) == seen["read"]) is (name in NEVER_REFUSED)


def test_every_flipped_bit_of_a_sealed_manifest_is_found() -> None:
    manifest = Manifest(
        version=MANIFEST_VERSION,
        plan=make_plans("demo", ["laptop-x86-16gb"])[0].model_copy(update={"rejected": ()}),
        weights_sha256="0" * 64,
        files={"a": FileFact(bytes=1, sha256="0" * 64)},
        tools={"edgekit": "1"},
        self_check="ran",
    )
    whole = to_sealed_json(manifest)

    def read(data: bytes) -> tuple[Manifest, bool]:
        return read_sealed_json(data, Manifest, "edgekit.json", versions=MANIFEST_VERSION, sealed_since=2, fix="again")

    assert read(whole) == (manifest, True)
    for position in range(0, len(whole), 11):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        with pytest.raises(InvalidInput):
            read(bytes(data))


def test_a_boot_has_an_id_or_each_process_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = files.boot_id()
    assert here == files.boot_id() and len(here) >= 32
    monkeypatch.setattr(Path, "read_text", _missing)
    files.boot_id.cache_clear()
    try:
        assert files.boot_id() == files.boot_id() != here
        assert "unknown" not in files.boot_id()
    finally:
        files.boot_id.cache_clear()


def _missing(path: Path) -> str:
    raise FileNotFoundError(path)


def test_a_tilde_in_edgekit_home_is_the_users_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EDGEKIT_HOME", "~/kept")
    assert home() == tmp_path / "kept"
    assert user_profiles() == tmp_path / "kept" / "profiles"
    monkeypatch.setenv("EDGEKIT_HOME", "~nobody-here/kept")
    with pytest.raises(InvalidInput, match="EDGEKIT_HOME='~nobody-here/kept': no such user"):
        home()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="preloads a library that cc builds")
@pytest.mark.parametrize(
    ("operations", "most"),
    [
        ("prune prefixes lab publish pull quantise calibrate", 1),
        pytest.param("prune prefixes lab publish pull export", 3, marks=pytest.mark.long),
    ],
    ids=["quick ones", "others and more often"],
)
def test_an_operation_survives_failing_calls(operations: str, most: int, tmp_path: Path) -> None:
    program = Path(__file__).parents[1] / "helpers" / "fault_points.py"
    words = [word for operation in operations.split() for word in ("--operation", operation)]
    done = subprocess.run(
        [sys.executable, str(program), *words, "--most", str(most)],
        env=os.environ | {"EDGEKIT_HOME": str(tmp_path / "home")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    cases = [int(count) for count in re.findall(r": (\d+) cases", done.stdout)]
    assert len(cases) == 8 * len(operations.split()) and sum(cases) >= 3 * len(operations.split())


def test_an_unreadable_folder_is_written_without_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "open_folder", lambda path: os.open(path / "nowhere", os.O_RDONLY))
    assert staging_for(tmp_path / "made", 0).is_dir()
