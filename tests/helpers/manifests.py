"""Changes a manifest's fields and seals it again, as an attacker would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgekit.common.sealed_json import add_seal


def change_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads(path.read_text())
    del manifest["seal"]
    change(manifest)
    path.write_bytes(add_seal((json.dumps(manifest, indent=1) + "\n").encode()))
