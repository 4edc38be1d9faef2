"""Reference logits are stored exactly, within a size limit, and a full disk is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgekit.apps.bench.eval import reference
from edgekit.apps.bench.eval.reference import Logits, Windows, stored, windows_of
from edgekit.errors import OutOfSpace

VOCABULARY = 32
WINDOWS = windows_of(list(range(20)), 16, 20)
NEEDED = 20 * VOCABULARY * 4


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))


def _logits(seed: int) -> list[Logits]:
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(len(window), VOCABULARY)).astype(np.float32) for window in WINDOWS.tokens]


def _never() -> Iterator[Logits]:
    raise AssertionError("they are kept already")


def _keep(seed: int, windows: Windows = WINDOWS) -> list[Logits]:
    return stored(f"model {seed}", windows, VOCABULARY, lambda: iter(_logits(seed)))


def _bytes(home: Path) -> int:
    return sum(path.stat().st_size for path in (home / "reference").rglob("*") if path.is_file())


def test_stored_logits_are_bit_for_bit_those_computed() -> None:
    first = _keep(1)
    again = stored("model 1", WINDOWS, VOCABULARY, _never)
    for wanted, one, other in zip(_logits(1), first, again, strict=True):
        assert one.tobytes() == other.tobytes() == wanted.tobytes()


def test_the_least_recently_used_logits_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "KEPT_BYTES", 3 * (NEEDED + 200))
    for seed in range(6):
        _keep(seed)
        stored("model 0", WINDOWS, VOCABULARY, _never)  # always used again, so always kept
        assert _bytes(tmp_path) <= reference.KEPT_BYTES
    with pytest.raises(AssertionError, match="kept already"):
        stored("model 1", WINDOWS, VOCABULARY, _never)


def test_logits_that_are_read_survive_being_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "KEPT_BYTES", 0)  # one set alone is over the bound: it is all that is kept
    mine = _keep(1)
    _keep(2)
    for one, wanted in zip(mine, _logits(1), strict=True):
        assert one.tobytes() == wanted.tobytes()


def test_a_full_disk_is_reported_before_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "free_bytes", lambda path: 100)
    with pytest.raises(OutOfSpace, match=f"{NEEDED:,} bytes are needed and 100 are free"):
        stored("model 1", WINDOWS, VOCABULARY, _never)
    assert _bytes(tmp_path) == 0


def test_truncated_logits_are_computed_again(tmp_path: Path) -> None:
    _keep(1)
    (path,) = (tmp_path / "reference").rglob("*.npy")
    path.write_bytes(path.read_bytes()[:-8])
    assert [rows.tobytes() for rows in _keep(1)] == [rows.tobytes() for rows in _logits(1)]
