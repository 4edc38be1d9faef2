"""Environment variables with a fixed set of values."""

from __future__ import annotations

import os

from edgekit.errors import InvalidInput, quote_short


def environment_choice(name: str, *words: str) -> str:
    """Return the variable's value in lower case; an empty string if it is unset."""
    setting = os.environ.get(name, "").strip().lower()
    if setting not in ("", *words):
        raise InvalidInput(f"{name}={quote_short(setting)}: set it to {' or '.join(words)}")
    return setting
