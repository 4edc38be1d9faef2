"""The text on which integers are chosen."""

from __future__ import annotations

from typing import NamedTuple

from edgekit.weights.neutral import CalibrationFact


class Calibration(NamedTuple):
    """Token sequences of one length, and what they are."""

    sequences: tuple[tuple[int, ...], ...]
    fact: CalibrationFact
