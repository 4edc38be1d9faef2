# The public names of this module, each imported on first use.
from edgekit.calibrating import calibration_for as calibration_for
from edgekit.cli._artifact_for import artifact_for as artifact_for
from edgekit.cli._console import console as console, draw as draw
from edgekit.cli._options import (
    CALIBRATION as CALIBRATION,
    OPENING as OPENING,
    SectionedCommand as SectionedCommand,
    SomeFields as SomeFields,
    adapter_of as adapter_of,
    as_typed as as_typed,
    json_option as json_option,
    options as options,
)
from edgekit.cli._progress import announce as announce, progress_display as progress_display, reporter as reporter
