"""Copies folders with a manifest, of neutral weights or artifacts, whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from edgekit.artifact.artifact import Artifact, staging_for
from edgekit.common.files import copy_file, disk_full, sync_folder
from edgekit.contracts.manifest import MANIFEST as ARTIFACT_MANIFEST
from edgekit.contracts.neutral import MANIFEST, NeutralWeights
from edgekit.errors import InvalidInput


def refuse_existing(output: Path) -> None:
    """Refuse to write where something lies already."""
    if output.exists() or output.is_symlink():
        raise InvalidInput(f"{output}: exists already; nothing is overwritten: choose another path or remove it")


def copy_weights(weights: NeutralWeights, output: Path) -> None:
    """Copy the folder of `weights` to `output`, which must not exist; a failure leaves nothing there."""
    _copy(weights.folder, [*weights.manifest.files, MANIFEST], output)


def copy_artifact(artifact: Artifact, output: Path) -> None:
    """Copy a sealed artifact to `output`, which must not exist; a failure leaves nothing there."""
    _copy(artifact.folder, [*artifact.manifest.files, ARTIFACT_MANIFEST], output)


def _copy(folder: Path, names: Sequence[str], output: Path) -> None:
    needed = sum((folder / name).stat().st_size for name in names)
    staging = staging_for(output, needed)
    try:
        with disk_full(output, needed):
            for name in names:
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                copy_file(folder / name, staging / name)
            sync_folder(staging)
        refuse_existing(output)
        staging.rename(output)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_folder(output.parent)
