"""Packages that are only what their metadata declares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


def declare(folder: Path, groups: Mapping[str, Mapping[str, str]], patch: pytest.MonkeyPatch) -> None:
    """Write a package's entry points into `folder`, as pip does, and put it on `sys.path`."""
    (info := folder / "declared-1.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1\n")
    text = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in each.items()) for group, each in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(text))
    patch.syspath_prepend(str(folder))
