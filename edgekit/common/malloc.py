"""The heap of the C library."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def return_unused() -> None:
    """Return freed heap memory to the system, if the C library can (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
