"""Keeps the vendor's chatter out of the user's terminal while its modules are imported and its passes run.

Only warnings and log lines are kept back; errors are raised as ever.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hushed() -> Iterator[None]:
    """Nothing below an error is said from Python."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


@contextmanager
def hushed_to_the_bottom() -> Iterator[None]:
    """Nor from C++, which writes to the process's standard error; for moments only, since it is everybody's."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        with hushed():
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
