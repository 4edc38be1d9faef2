"""Keeps vendor warnings and log lines out of the terminal. Errors are raised as usual."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_output() -> Iterator[None]:
    """Silence Python warnings and log lines below ERROR."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Also silence C++ output by redirecting file descriptor 2. This is process-wide: keep the block short."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        with quiet_output():
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
