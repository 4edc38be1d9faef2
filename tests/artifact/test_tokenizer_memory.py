"""Measuring the memory of a tokenizer for an export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgekit.artifact.tokenizer_memory import measure

DEMO = Path(__file__).parents[2] / "edgekit" / "_demo" / "target"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this OS does not report memory")
def test_a_larger_vocabulary_takes_more(tmp_path: Path) -> None:
    small = measure(DEMO)
    assert small is not None
    assert 0.5e6 < small.held < 4e6
    document = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary |= {f"padding {number}": len(vocabulary) + number for number in range(100_000)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    large = measure(tmp_path)
    assert large is not None
    assert large.held > small.held + 5e6
    assert large.reading > small.reading


def test_without_a_tokenizer_nothing_is_measured(tmp_path: Path) -> None:
    assert measure(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert measure(tmp_path) is None
