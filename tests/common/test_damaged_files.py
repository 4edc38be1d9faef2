"""Damaged files of every stored format: each is read, or refused in one line, within a second and bounded memory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import fuzzing
import pytest
from stored_formats import FORMATS

from edgekit.common.sealed_json import read_sealed_json, to_sealed_json
from edgekit.contracts.manifest import MANIFEST_VERSION, FileFact, Manifest
from edgekit.errors import InvalidInput
from edgekit.planner.make import make_plans

# `make fuzz` has many more. An artifact is opened and answers each time.
COUNTS = {name: 500 for name in FORMATS if name != "gguf"} | {"artifact-onnx": 100}
NEVER_REFUSED = {name for name in FORMATS if name.startswith("fact-")}  # a damaged one is made again


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_damaged_files_are_read_or_refused_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
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
