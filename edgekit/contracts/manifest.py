"""The manifest of a sealed artifact. Pure data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from edgekit.common.base import Frozen
from edgekit.common.bounds import Count, FileBytes, Sha256, Text, Version
from edgekit.contracts.plan import Plan
from edgekit.errors import DamagedArtifact, quote_short

MANIFEST = "manifest.json"
MANIFEST_VERSION = 3  # 1: without a seal; 2: without chunks
CHUNKS_SINCE = 3
MAX_MANIFEST_BYTES = 32 << 20
SIGNATURE = "model.sig"  # a detached signature of all other files, so the manifest cannot list it
MAX_SIGNATURE_BYTES = 8 << 20
MAX_FILES = 4096
MAX_CHUNKS = 1 << 18  # of one file
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,127}){0,3}")


class FileChunk(Frozen):
    """Size and hash of a part of a file. The parts are contiguous."""

    bytes: Annotated[int, Field(ge=1, le=1 << 40)]
    sha256: Sha256


class FileFact(Frozen):
    """Size and hash of one file, and its chunks for delivery."""

    bytes: FileBytes
    sha256: Sha256
    chunks: Annotated[tuple[FileChunk, ...], Field(max_length=MAX_CHUNKS)] = ()  # none: the file is one chunk

    @model_validator(mode="after")
    def _chunks_fill_the_file(self) -> FileFact:
        total = sum(chunk.bytes for chunk in self.chunks)
        if self.chunks and total != self.bytes:
            raise ValueError(f"its chunks have {total:,} bytes and it has {self.bytes:,}")
        return self

    @property
    def parts(self) -> tuple[FileChunk, ...]:
        """The chunks of the file; none for an empty file."""
        whole = (FileChunk(bytes=self.bytes, sha256=self.sha256),) if self.bytes else ()
        return self.chunks or whole


class ModelOrigin(Frozen):
    """The origin of the model, as stated by its source; None: not stated."""

    repository: Text | None = None
    revision: Text | None = None
    licence: Text | None = None
    base: Text | None = None
    source_files: Annotated[dict[Text, Sha256], Field(max_length=1000)] = Field(default_factory=dict)
    calibration_sha256: Sha256 | None = None
    calibration_tokens: Count | None = None


class Manifest(Frozen):
    """An artifact's plan and files, and the result of its self-check."""

    version: Version
    plan: Plan
    weights_sha256: Sha256  # of the neutral weights it was packed from
    files: Annotated[dict[Text, FileFact], Field(max_length=MAX_FILES)]
    tools: dict[Text, Text]  # package → version
    self_check: Text
    origin: ModelOrigin | None = None  # None: an older edgekit did not record it

    @model_validator(mode="after")
    def _plan_agrees(self) -> Manifest:
        plan = self.plan
        if any(layer >= len(plan.model.layers) for layer in plan.exits):
            raise ValueError(f"plan.exits {list(plan.exits)} are not layers of the model, which has fewer")
        head = plan.drafter
        if head is not None and (
            head.target_hidden_size != plan.model.hidden_size or max(head.hidden_layers) > len(plan.model.layers)
        ):
            raise ValueError(f"plan.drafter reads layers {list(head.hidden_layers)} of another model")
        expected = plan.cache.window or plan.context
        if plan.storage.capacity_tokens != expected:
            raise ValueError(
                f"plan.storage.capacity_tokens is {plan.storage.capacity_tokens}, and the plan keeps {expected} tokens"
            )
        return self


def check_names(folder: Path, manifest: Manifest) -> None:
    """Refuse a manifest whose names could lead outside the artifact's folder."""
    for name in manifest.files:
        if not FILE_NAME.fullmatch(name) or ".." in name or name in (MANIFEST, SIGNATURE):
            raise DamagedArtifact(
                f"{folder}: the manifest names {quote_short(name)}, which cannot be a file of an artifact"
            )
