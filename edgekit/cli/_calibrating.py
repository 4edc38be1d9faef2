"""Reads calibration text for commands; chats are rendered by the model's template, in the runtime's own worker."""

from __future__ import annotations

from pathlib import Path

import click

from edgekit.source import ModelSource
from edgekit.weights.calibration import LENGTH, SEQUENCES, Calibration, read_calibration

DEFAULT_TEXT = Path("default")


def calibration_for(
    path: Path | None, source: ModelSource, *, sequences: int = SEQUENCES, length: int = LENGTH
) -> Calibration | None:
    """The text at `path` for that model; `default` is the one that comes with edgekit. Warnings go to stderr."""
    if path is None:
        return None
    from edgekit.runtime.template import read_template

    template = read_template(source.folder)
    try:
        calibration = read_calibration(
            None if path == DEFAULT_TEXT else path,
            source.folder,
            vocabulary=source.spec.vocab_size,
            sequences=sequences,
            length=length,
            render=(lambda messages: template.render(messages, add_generation_prompt=False))
            if template.exists
            else None,
        )
    finally:
        template.close()
    for warning in calibration.warnings:
        click.echo(f"edgekit: {warning}", err=True)
    return calibration
