"""Keeps the vendor's chatter out of the user's terminal while its modules are imported and its passes run.

Only warnings and log lines are kept back; errors are raised as ever.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("executorch", "torch", "torchao", "coremltools", "root")


@contextmanager
def hushed() -> Iterator[None]:
    """Nothing below an error is said."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
