"""The calibration options of `export` and `quantize`, and reading the text that they name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import click
from pydantic import Field

from edgekit.calibrating import calibration_for
from edgekit.cli._console import wrapped
from edgekit.common.base import Frozen
from edgekit.contracts.neutral import weights_store
from edgekit.contracts.recipe import Recipe
from edgekit.model.source import ModelSource
from edgekit.quant.calibration import Calibration
from edgekit.quant.compute import Compute
from edgekit.quant.effort import Effort


class Calibrating(Frozen):
    """The calibration text, the method of quantisation, the effort, the device that computes, and the store."""

    calibrate: Path | None = Field(
        default=None,
        description="Calibration text: a file of text, jsonl of texts or chats, .npy tokens, or `default` for ours.",
    )
    method: Literal["rtn", "gptq", "awq"] | None = Field(
        default=None, description="Quantisation method; without it, gptq with calibration text, else rtn."
    )
    effort: Effort | None = Field(
        default=None,
        description="quick rounds to nearest, normal calibrates, high tunes the scales too; without it, normal up to"
        " 0.6 billion parameters, else quick.",
    )
    compute: Compute | None = Field(
        default=None,
        description="Where torch computes; without it, on a GPU that torch finds, else on the processor. edgekit was"
        " never run on a GPU.",
    )
    store: Path | None = Field(default=None, description="Folder for neutral weights, instead of the user's cache.")


def calibration_of(options: Calibrating, source: ModelSource, recipes: Iterable[Recipe]) -> Calibration | None:
    """Read the calibration text that the options select, if any. Prints the expected duration to stderr."""
    return calibration_for(
        source,
        recipes,
        calibrate=options.calibrate,
        method=options.method,
        effort=options.effort,
        compute=options.compute,
        store=weights_store(options.store),
        announce=announce,
    )


def announce(text: str) -> None:
    """Print a note to stderr, wrapped on a terminal; stdout stays clean for scripts."""
    click.echo(wrapped(f"edgekit: {text}"), err=True)
