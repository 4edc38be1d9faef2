"""Workloads as data, read from YAML: cases, each of one or several requests.

Parts of a prompt are encoded separately, so that a part shared by two requests has the same tokens in both.
"""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from edgekit.common.base import Frozen
from edgekit.common.bounds import Repeats
from edgekit.common.parsing import read_text, read_yaml
from edgekit.errors import InvalidInput, UnknownName

MAX_TEXT_FILE_BYTES = 8 << 20

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,_@+-]{0,63}$")]
_Tokens = Annotated[int, Field(ge=1, le=1 << 20)]


class PromptText(Frozen):
    """A part of a prompt: given words (`text`, `file`) or generated ones (`synthetic`), repeated or cut to `tokens`."""

    text: Annotated[str, Field(max_length=1 << 20)] | None = None
    file: str | None = None  # in the folder of the workload's file
    synthetic: Literal["prose", "code"] | None = None
    seed: Annotated[int, Field(ge=0, le=1 << 31)] = 0
    tokens: _Tokens | None = None  # its exact length: the text is repeated or cut

    @model_validator(mode="after")
    def _has_one_source(self) -> PromptText:
        given = [name for name in ("text", "file", "synthetic") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of text, file and synthetic")
        if self.synthetic and self.tokens is None:
            raise ValueError("synthetic text needs tokens: how many")
        return self


class WorkloadRequest(Frozen):
    """One prompt and the number of tokens to generate. End-of-text is ignored, so that runs are comparable."""

    prompt: Annotated[tuple[PromptText, ...], Field(min_length=1, max_length=64)]
    output_tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    depth_tokens: Annotated[int, Field(ge=0, le=1 << 20)] = 0  # of the prompt, processed before prefill is timed
    continues: bool = False  # the prompt follows the previous request and its answer


class Case(Frozen):
    """Consecutive requests; their times are summed."""

    name: _Name
    requests: Annotated[tuple[WorkloadRequest, ...], Field(min_length=1, max_length=256)]

    @model_validator(mode="after")
    def _begins(self) -> Case:
        if self.requests[0].continues:
            raise ValueError("the first request cannot continue another one")
        return self


class Workload(Frozen):
    """Cases, the number of their repeats, and the context with which the runtime is opened."""

    version: Literal[1] = 1
    name: _Name
    title: Annotated[str, Field(max_length=400)]
    warmups: Annotated[int, Field(ge=0, le=100)] = 1
    repeats: Repeats = 5
    context: _Tokens | None = None
    window: _Tokens | None = None
    sinks: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    cases: Annotated[tuple[Case, ...], Field(min_length=1, max_length=256)]

    @model_validator(mode="after")
    def _names_differ(self) -> Workload:
        names = [case.name for case in self.cases]
        if len(set(names)) < len(names):
            raise ValueError("two cases have the same name")
        return self

    @property
    def sha256(self) -> str:
        """The hash of the workload's content."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def repeated(self, repeats: int | None) -> Workload:
        """Return the workload with another number of repeats; None: with its own."""
        return self if repeats is None else self.model_copy(update={"repeats": repeats})


def bundled_workloads() -> dict[str, Traversable]:
    """Return the workloads that come with edgekit, keyed by name."""
    folder = files("edgekit.apps.bench") / "workloads"
    return {
        path.name.removesuffix(".yaml"): path
        for path in sorted(folder.iterdir(), key=lambda path: path.name)
        if path.name.endswith(".yaml")
    }


def read_workload(name: str | Path) -> Workload:
    """Read a bundled workload by name, or a YAML file, with the texts of its files."""
    bundled = bundled_workloads()
    if str(name) in bundled:
        return read_yaml(bundled[str(name)], Workload)
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise UnknownName("workload", str(name), [*bundled, "a YAML file"])
    return _with_files(read_yaml(path, Workload), path.parent)


def _with_files(workload: Workload, folder: Path) -> Workload:
    """Return the workload with the texts of its files inlined, so that it is the same on every machine."""
    cases = tuple(
        case.model_copy(
            update={
                "requests": tuple(
                    request.model_copy(update={"prompt": tuple(_inlined(part, folder) for part in request.prompt)})
                    for request in case.requests
                )
            }
        )
        for case in workload.cases
    )
    return workload.model_copy(update={"cases": cases})


def _inlined(part: PromptText, folder: Path) -> PromptText:
    if part.file is None:
        return part
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", part.file):
        raise InvalidInput(f"file {part.file!r}: must be the plain name of a file next to the workload")
    text = read_text(folder / part.file, MAX_TEXT_FILE_BYTES)
    return part.model_copy(update={"file": None, "text": text})
