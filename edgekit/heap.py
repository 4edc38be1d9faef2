"""The C library's heap. Knows nothing of who filled it."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def return_unused() -> None:
    """Give back to the system what was freed and lies in malloc's heap, where the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
