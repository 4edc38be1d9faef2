"""References to an artifact, kept in the store instead of the neutral weights from which it was packed. Pure data.

The artifact holds the same integers. A reference keeps the rest, and `edgekit.artifact.rebuilding` puts both together.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.bounds import FileBytes, FileName, Sha256, Text, Version
from edgekit.common.content_store import ContentStore
from edgekit.common.parsing import MAX_TEXT_BYTES, read_bytes
from edgekit.common.sealed_json import read_sealed_json
from edgekit.contracts.manifest import MANIFEST, MAX_MANIFEST_BYTES
from edgekit.contracts.neutral import is_neutral, read_manifest
from edgekit.errors import EdgekitError

REFERENCE = "reference.json"
REST = "rest"  # the subfolder of what the artifact does not hold
REFERENCE_VERSION = 1
# Read-only, in the package: examples/training/quantise_demo.py writes it. Its keys do not count package versions.
BUNDLED_WEIGHTS = ContentStore(Path(__file__).parents[1] / "_demo" / "weights")

# Fills a folder with the weights of a key, as they were; False: they must be quantised again.
Rebuild = Callable[[ContentStore, str, Path], bool]


class HeldTensor(Frozen):
    """A stored tensor whose bytes lie in a file of the artifact, as they are or, if `is_widened`, each as a float32."""

    file: FileName
    offset: FileBytes
    is_widened: bool = False


class WeightsReference(Frozen):
    """The artifact that holds the integers of neutral weights."""

    version: Version = REFERENCE_VERSION
    key: Sha256  # of the weights in the store
    weights_sha256: Sha256
    artifact: Text  # its folder; in the file it may be relative to the reference's folder
    artifact_sha256: Sha256
    # Tensors that are read without the artifact's target, whose libraries may be missing; by their names on the disk.
    held: dict[Text, HeldTensor] = Field(default_factory=dict, max_length=100_000)

    @property
    def is_there(self) -> bool:
        """True while the artifact has its manifest; its other files are checked when they are read."""
        try:
            manifest = read_bytes(Path(self.artifact) / MANIFEST, MAX_MANIFEST_BYTES)
        except EdgekitError:
            return False
        return hashlib.sha256(manifest).hexdigest() == self.artifact_sha256


def reference_place(store: ContentStore, key: str) -> Path:
    """Return the folder for the reference of weights."""
    return store.root / hashlib.sha256(f"reference {key}".encode()).hexdigest()


def read_reference(folder: Path) -> WeightsReference:
    """Read the reference in `folder`. Raises `InvalidInput`."""
    place = folder / REFERENCE
    data = read_bytes(place, MAX_TEXT_BYTES)
    reference = read_sealed_json(
        data, WeightsReference, str(place), versions=REFERENCE_VERSION, sealed_since=1, fix="quantise again"
    )[0]
    return reference.model_copy(update={"artifact": os.path.normpath(folder / reference.artifact)})


def refers(store: ContentStore, key: str) -> bool:
    """Return True if the store has a reference for the weights, and the artifact is still there."""
    try:
        return read_reference(reference_place(store, key)).is_there
    except EdgekitError:
        return False


def key_of(store: ContentStore, weights_sha256: str) -> str | None:
    """Return the key of weights in the store, whole or as a reference; None if it has none of this hash."""
    for folder in store.folders():
        try:
            if is_neutral(folder) and read_manifest(folder).weights_sha256 == weights_sha256:
                return folder.name
            if (folder / REFERENCE).is_file():
                reference = read_reference(folder)
                if reference.weights_sha256 == weights_sha256 and reference.is_there:
                    return reference.key
        except EdgekitError:
            continue
    return None
