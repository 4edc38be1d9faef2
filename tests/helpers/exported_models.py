"""Tiny models as files of a target, made once a session."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import family_models as models

from edgekit.common.progress import Progress
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan


class Made(NamedTuple):
    """An exported model, its plan and its weights."""

    plan: Plan
    files: Path
    weights: NeutralWeights
    folder: Path


class ExportedModels:
    """Tiny models of `families` (a name, then model type and config), exported by `export` with these plans."""

    def __init__(
        self,
        target: str,
        families: Mapping[str, tuple[str, dict[str, Any]]],
        export: Callable[[Plan, NeutralWeights, Path, Progress], None],
        **plan: Any,
    ) -> None:
        self._target, self._families, self._export, self._plan = target, families, export, plan
        self._folder = tempfile.TemporaryDirectory(prefix=f"{target}-models-")
        self.made, self.reference = cache(self._made), cache(self._reference)

    def folder_of(self, family: str, config: str = "") -> Path:
        """The folder of a family's tiny model, as `save_pretrained` writes it; `config`: changes of it, as JSON."""
        name = family.replace(" ", "-").replace(",", "") + (sha256(config.encode()).hexdigest()[:8] if config else "")
        folder = Path(self._folder.name) / name
        if not (folder / "config.json").exists():
            kind, usual = self._families[family]
            models.write_model(folder, kind, {**usual, **json.loads(config or "{}")})
        return folder

    def _made(self, family: str, recipe: str = "s4-g32", config: str = "", **plan: Any) -> Made:
        """The files of a family's tiny model."""
        folder = self.folder_of(family, config)
        weights = models.weights_of(folder, recipe, folder.parent / "store")
        chosen = models.plan_for(weights.model, weights.recipe, **{**self._plan, **plan})
        chosen = chosen.model_copy(update={"target": self._target})
        files = Path(tempfile.mkdtemp(dir=self._folder.name))
        self._export(chosen, weights, files, models.quiet)
        # Opened anew: what the export mapped would stay open for the whole session.
        return Made(chosen, files, NeutralWeights.open(weights.folder), folder)

    def _reference(self, family: str, recipe: str = "s4-g32") -> Any:
        """transformers' model with the dequantised weights."""
        found = self.made(family, recipe)
        return models.reference_of(found.folder, found.weights)
