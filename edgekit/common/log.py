"""The "edgekit" logger: silent by default; EDGEKIT_LOG=debug or EDGEKIT_LOG=info writes to stderr.

It reports decisions (admission, fallbacks, retries, dropped prefixes, killed workers), never prompts or answers.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from functools import lru_cache

log = logging.getLogger("edgekit")
# Work of seconds that an opening does once on a machine. A child of `log`; commands print its lines.
slow = log.getChild("slow")


def _set_up() -> None:
    log.addHandler(logging.NullHandler())
    level = os.environ.get("EDGEKIT_LOG", "").lower()
    if not level:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s edgekit %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if level == "debug" else logging.INFO)
    if level not in ("debug", "info"):
        log.warning("EDGEKIT_LOG: must be debug or info, found %.20r; logging at info", level)


def warn(text: str) -> None:
    """Tell it once in a line of a command, or as Python's warning where a program calls."""
    if slow.handlers:
        _tell(text)
    else:
        warnings.warn(text, stacklevel=3)


@lru_cache(maxsize=64)
def _tell(text: str) -> None:
    slow.warning("%s", text)


def show_slow(show: Callable[[str], None]) -> None:
    """Call `show` with each line of `slow`, unless `EDGEKIT_LOG` writes them already."""
    if log.isEnabledFor(logging.INFO):
        return

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            show(record.getMessage())

    slow.setLevel(logging.INFO)
    slow.propagate = False
    slow.handlers = [Shown()]


_set_up()
