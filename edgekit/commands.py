"""The helpers that an app or another package needs to write a command; entry points `edgekit.commands` name it.

A command is a click command. `options` turns the fields of frozen models into its options, so that each option has one
name, type, default and text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.common.lazy import lazy

if TYPE_CHECKING:
    from edgekit.calibrating import calibration_for
    from edgekit.cli._artifact_for import artifact_for
    from edgekit.cli._console import console, draw
    from edgekit.cli._options import (
        CALIBRATION,
        OPENING,
        SectionedCommand,
        SomeFields,
        adapter_of,
        as_typed,
        json_option,
        options,
    )
    from edgekit.cli._progress import announce, progress_display, reporter


__all__ = [
    "CALIBRATION",
    "OPENING",
    "SectionedCommand",
    "SomeFields",
    "adapter_of",
    "announce",
    "artifact_for",
    "as_typed",
    "calibration_for",
    "console",
    "draw",
    "json_option",
    "options",
    "progress_display",
    "reporter",
]

__getattr__ = lazy(
    __name__,
    {
        "edgekit.calibrating": ["calibration_for"],
        "edgekit.cli._artifact_for": ["artifact_for"],
        "edgekit.cli._console": ["console", "draw"],
        "edgekit.cli._options": [
            "CALIBRATION",
            "OPENING",
            "SectionedCommand",
            "SomeFields",
            "adapter_of",
            "as_typed",
            "json_option",
            "options",
        ],
        "edgekit.cli._progress": ["announce", "progress_display", "reporter"],
    },
)
