"""Files: the folder of caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgekit.common import files
from edgekit.common.files import home, user_profiles
from edgekit.errors import InvalidInput


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
