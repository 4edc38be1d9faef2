"""What every process of the suite needs."""

from __future__ import annotations

import os
import signal

from edgekit.installed import UNREPORTED


def pytest_configure() -> None:
    """Nothing is reported; and ctrl-C works: who starts the suite in the background may have ignored it."""
    for name, value in UNREPORTED.items():  # before any test imports what it is for
        os.environ.setdefault(name, value)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
