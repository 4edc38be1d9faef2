"""The helpers that an app or another package needs to write a command; entry points `edgekit.commands` name it.

A command is a click command. `options` turns the fields of frozen models into its options, so that each option has one
name, type, default and text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekit.common.lazy import lazy

if TYPE_CHECKING:
    from edgekit.cli._artifact_for import artifact_for
    from edgekit.cli._calibration import Calibrating, announce, calibration_of
    from edgekit.cli._console import console, draw
    from edgekit.cli._options import (
        OPENING,
        OutputFile,
        SectionedCommand,
        SomeFields,
        adapter_of,
        as_typed,
        json_option,
        options,
    )
    from edgekit.cli._progress import progress_display


__all__ = [
    "OPENING",
    "Calibrating",
    "OutputFile",
    "SectionedCommand",
    "SomeFields",
    "adapter_of",
    "announce",
    "artifact_for",
    "as_typed",
    "calibration_of",
    "console",
    "draw",
    "json_option",
    "options",
    "progress_display",
]

__getattr__ = lazy(
    __name__,
    {
        "edgekit.cli._artifact_for": ["artifact_for"],
        "edgekit.cli._calibration": ["Calibrating", "announce", "calibration_of"],
        "edgekit.cli._console": ["console", "draw"],
        "edgekit.cli._options": [
            "OPENING",
            "OutputFile",
            "SectionedCommand",
            "SomeFields",
            "adapter_of",
            "as_typed",
            "json_option",
            "options",
        ],
        "edgekit.cli._progress": ["progress_display"],
    },
)
