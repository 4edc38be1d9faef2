"""The dated table of known models: tasks, licence, shapes and sources."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from edgekit.common.base import Frozen
from edgekit.common.bounds import Text, Word
from edgekit.common.parsing import read_yaml
from edgekit.model.families import model_from_config
from edgekit.model.source import ModelSource

_FILE = Path(__file__).with_name("known_models.yaml")


class KnownModel(Frozen):
    """One model of the table."""

    id: Text  # on the hub
    tasks: tuple[Literal["chat", "code", "embed"], ...]
    licence: Text
    needs_account: bool = False  # the hub asks to accept the licence first
    published_parameters: Annotated[int, Field(ge=1)]
    sources: tuple[Word, ...]
    config: dict[str, Any]  # as in config.json

    def source(self) -> ModelSource:
        """The model for the planner, without its files."""
        text = json.dumps(self.config, sort_keys=True).encode()
        name = self.id.rpartition("/")[2]
        return ModelSource(
            given=self.id,
            name=name,
            folder=_FILE.parent,
            weights=_FILE.parent,
            spec=model_from_config(self.config, name, f"{_FILE.name}: {self.id}"),
            config_sha256=hashlib.sha256(text).hexdigest(),
            tokenizer_files=(),
            has_weights=False,
        )


class KnownModels(Frozen):
    """The table, the date of its facts, and its sources by name."""

    checked: Text
    sources: dict[Word, Text]
    models: tuple[KnownModel, ...]


def known_models() -> KnownModels:
    """Read the table."""
    return read_yaml(_FILE, KnownModels)
