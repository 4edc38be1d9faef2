"""Copies folders of neutral weights, whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgekit.artifact.artifact import staging_for
from edgekit.common.files import copy_file, disk_full, sync_folder
from edgekit.contracts.neutral import MANIFEST, NeutralWeights
from edgekit.errors import InvalidInput


def refuse_existing(output: Path) -> None:
    """Refuse to write where something lies already."""
    if output.exists() or output.is_symlink():
        raise InvalidInput(f"{output}: exists already; nothing is overwritten: choose another path or remove it")


def copy_weights(weights: NeutralWeights, output: Path) -> None:
    """Copy the folder of `weights` to `output`, which must not exist; a failure leaves nothing there."""
    folder, names = weights.folder, [*weights.manifest.files, MANIFEST]
    needed = sum((folder / name).stat().st_size for name in names)
    staging = staging_for(output, needed)
    try:
        with disk_full(output, needed):
            for name in names:
                copy_file(folder / name, staging / name)
            sync_folder(staging)
        refuse_existing(output)
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_folder(output.parent)
