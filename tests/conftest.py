"""What every process of the suite needs."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Who starts the suite in the background may have ignored ctrl-C; processes inherit that, and tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
