"""What the heap of the C library has given out."""

from __future__ import annotations

import ctypes


class _Counts(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    )  # fmt: skip


def used_bytes() -> int | None:
    """Return the bytes that malloc has given out; None where the C library does not say. Holes are not among them."""
    try:
        count = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    count.restype = _Counts
    counts = count()
    return int(counts.uordblks + counts.hblkhd)
