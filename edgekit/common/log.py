"""The "edgekit" logger: silent by default; EDGEKIT_LOG=debug or EDGEKIT_LOG=info writes to stderr.

It reports decisions (admission, fallbacks, retries, dropped prefixes, killed workers), never prompts or answers.
"""

from __future__ import annotations

import logging
import os

log = logging.getLogger("edgekit")


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


_set_up()
