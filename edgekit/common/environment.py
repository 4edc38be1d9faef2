"""Variables of the environment that choose among a few words."""

from __future__ import annotations

import os

from edgekit.errors import InvalidInput, quote_short


def environment_choice(name: str, *words: str) -> str:
    """Return the word that a variable is set to, in lower case; an empty text where it is not set."""
    setting = os.environ.get(name, "").strip().lower()
    if setting not in ("", *words):
        raise InvalidInput(f"{name}={quote_short(setting)}: set it to {' or '.join(words)}")
    return setting
