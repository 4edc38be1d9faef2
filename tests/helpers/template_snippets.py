"""Expressions and templates of one line, for which two interpreters of Jinja are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_STORED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/template_snippets.json").read_text())
MESSAGES: list[dict[str, Any]] = _STORED["messages"]
EXPRESSIONS: list[str] = _STORED["expressions"]
TEMPLATES: list[str] = _STORED["templates"]
