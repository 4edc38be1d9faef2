"""The heap of the C library."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def return_unused() -> None:
    """Return freed memory of malloc's heap to the system, where the C library can (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
