"""How the integers of each part are chosen: one small contract for rounding to nearest, GPTQ and AWQ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edgekit.model import ModelSpec
from edgekit.recipe import Recipe
from edgekit.weights.neutral import Method
from edgekit.weights.parts import Choice, Part, Read

if TYPE_CHECKING:
    from edgekit.weights.calibration import Calibration


class Chooser(Protocol):
    """Sees the parts in order, each before it is stored and after."""

    def choose(self, part: Part) -> Choice:
        """What to store of a part."""

    def advance(self, part: Part, shard: Path) -> None:
        """The part stands in `shard`, from this run or an earlier one."""


class Nearest:
    """Rounding to nearest: every matrix by itself, block by block."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def choose(self, part: Part) -> Choice:
        return Choice(self._read, {}, {})

    def advance(self, part: Part, shard: Path) -> None:
        pass


def chooser_for(
    method: Method, model: ModelSpec, recipe: Recipe, calibration: Calibration | None, read: Read
) -> Chooser:
    """The chooser of a method."""
    return Nearest(read)
