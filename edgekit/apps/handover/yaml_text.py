"""YAML for servers: in the order of the data, with a comment at the top."""

from __future__ import annotations

from typing import Any

import yaml


def yaml_text(data: Any, comment: str) -> str:
    """Return `data` as YAML under a comment of one line."""
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=110)
    return f"# {comment}\n{text}"
