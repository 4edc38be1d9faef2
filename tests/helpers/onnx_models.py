"""Tiny models as files of the onnx target, made once a session."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import family_models as models
import numpy as np
from edgekit_onnx.engine import OnnxEngine
from edgekit_onnx.export import EXACT, export

from edgekit.artifact.artifact import seal
from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import Recipe


class OnnxModel(NamedTuple):
    """Exported files, which tests open."""

    plan: Plan
    files: Path
    weights: NeutralWeights
    folder: Path  # of the float model

    def open(self, *, exact: bool = False, policy: KVEvictionPolicy | None = None, kv_bits: int = 0) -> OnnxEngine:
        """An engine; one that offers only a cache of `kv_bits`, if they are given."""
        plan = self.plan if policy is None else self.plan.model_copy(update={"cache": policy})
        engine = OnnxEngine(plan, self.files, exact=exact)
        if kv_bits:
            engine.capabilities = engine.capabilities.model_copy(update={"kv_bits": (kv_bits,)})
        return engine

    def copied(self, folder: Path) -> OnnxModel:
        """The same files in `folder`, where a test may damage them."""
        return self._replace(files=Path(shutil.copytree(self.files, folder / "out")))

    def sealed(self, folder: Path) -> OnnxModel:
        """The same files as a sealed artifact in `folder`."""
        files = folder / "artifact"
        seal(self.copied(folder).files, files, self.plan, weights_sha256="0" * 64, tools={}, self_check="none")
        return self._replace(files=files)

    def reference(self) -> Any:
        """transformers' model with the dequantised weights."""
        return models.reference_of(self.folder, self.weights)

    def logits(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """What transformers computes with these weights."""
        return models.logits_of(self.reference(), tokens)


def onnx_model(
    family: str,
    recipe: Recipe | str = "s4-g32",
    level: int = EXACT,
    *,
    config: dict[str, Any] | None = None,
    seed: int = 0,
    adapter_rank: int = 0,
    **plan: Any,
) -> OnnxModel:
    """A family's tiny model, with changes of its config; prompts are fed in chunks of 16 tokens."""
    folder = _folder(family, json.dumps(config or {}), seed)
    weights = NeutralWeights.open(_weights(folder, recipe))  # not kept open for the session: each has files and maps
    chosen = models.plan_for(weights.model, weights.recipe, **{"chunk_tokens": 16, **plan})
    chosen = chosen.model_copy(update={"adapter_rank": adapter_rank})
    return OnnxModel(chosen, _exported(chosen.to_json(), weights.folder, level), weights, folder)


@cache
def _all_models() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="edgekit-onnx-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _folder(family: str, config: str, seed: int) -> Path:
    kind, usual = models.EVERY[family]
    folder = Path(tempfile.mkdtemp(dir=_all_models())) / "model"
    models.write_model(folder, kind, {**usual, **json.loads(config)}, seed=seed)
    return folder


@cache
def _weights(folder: Path, recipe: Recipe | str) -> Path:
    return models.weights_of(folder, recipe, folder.with_name("store")).folder


@cache
def _exported(plan: str, weights: Path, level: int) -> Path:
    files = Path(tempfile.mkdtemp(dir=_all_models()))
    export(Plan.model_validate_json(plan), NeutralWeights.open(weights), files, models.quiet, accuracy_level=level)
    return files
