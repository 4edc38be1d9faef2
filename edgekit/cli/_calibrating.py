"""The options of calibration, and the text that they name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import click
from pydantic import Field

from edgekit.api import calibration_for
from edgekit.cli._console import wrapped
from edgekit.common.base import Frozen
from edgekit.contracts.neutral import weights_store
from edgekit.contracts.recipe import Recipe
from edgekit.model.source import ModelSource
from edgekit.quant.calibration import Calibration


class Calibrating(Frozen):
    """The calibration text, the method of quantisation, the effort, and the store."""

    calibrate: Path | None = Field(
        default=None,
        description="Calibration text: a file of text, jsonl of texts or chats, .npy tokens, or `default` for ours.",
    )
    method: Literal["rtn", "gptq", "awq"] | None = Field(
        default=None, description="How integers are chosen; without it, gptq where there is calibration text, else rtn."
    )
    effort: Literal["quick", "normal"] | None = Field(
        default=None,
        description="quick rounds to the nearest, normal calibrates; without it, normal up to 0.6 billion parameters,"
        " else quick.",
    )
    store: Path | None = Field(default=None, description="Where neutral weights are kept, instead of the user's cache.")


def calibration_of(options: Calibrating, source: ModelSource, recipes: Iterable[Recipe]) -> Calibration | None:
    """Read the calibration text that the options ask for, or return None. Says on stderr how long it will take."""
    return calibration_for(
        source,
        recipes,
        calibrate=options.calibrate,
        method=options.method,
        effort=options.effort,
        store=weights_store(options.store),
        announce=announce,
    )


def announce(text: str) -> None:
    """Say what precedes long work on stderr, where output for scripts stays clean; wrapped on a terminal."""
    click.echo(wrapped(f"edgekit: {text}"), err=True)
