"""Tiny models as files of any target, made once a process: what the matrices of tests/targets open."""

from __future__ import annotations

import json
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import family_models as models
import numpy as np
import pytest
from eagle3_heads import write_head

from edgekit.contracts import recurrent
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.model.heads import read_head
from edgekit.plugins import load_target

ENGINES = {"onnx": "OnnxEngine", "mlx": "MlxEngine", "executorch": "ExecutorchEngine", "llamacpp": "LlamaCppEngine"}


class Model(NamedTuple):
    """The files of a target, which tests open, and where they came from."""

    target: str
    plan: Plan
    files: Path
    weights: NeutralWeights
    folder: Path  # of the float model

    def open(self, *, exact: bool = False, kv_bits: int = 0, **plan: Any) -> Any:
        """An engine; one that offers only a cache of `kv_bits`, if they are given."""
        kind = getattr(import_module(f"edgekit_{self.target}.engine"), ENGINES[self.target])
        engine = kind(self.plan.model_copy(update=plan), self.files, exact=exact)
        if kv_bits:
            engine.capabilities = engine.capabilities.model_copy(update={"kv_bits": (kv_bits,)})
        return engine

    def reference(self) -> Any:
        """transformers' model with the dequantised weights."""
        return models.reference_of(self.folder, self.weights)


def row(target: str, *values: Any, marks: tuple[Any, ...] = (), name: str = "") -> Any:
    """A row of a matrix, whose first value is a target."""
    usual = [getattr(pytest.mark, target), pytest.mark.quantize, *marks]
    usual += [pytest.mark.slow] if target == "executorch" else []
    return pytest.param(target, *values, marks=usual, id=f"{target}-{name}" if name else None)


def make_model(
    target: str,
    family: str,
    recipe: str = "s4-g32",
    *,
    head: tuple[int, ...] = (),
    config: dict[str, Any] | None = None,
    adapter_rank: int = 0,
    **plan: Any,
) -> Model:
    """A family's tiny model on a target. `head`: the layers after which a drafting head reads hidden states."""
    pytest.importorskip("transformers")
    if missing := load_target(target).missing():
        pytest.skip(missing)
    if head:
        plain = make_model(target, family, recipe, config=config, adapter_rank=adapter_rank, **plan)
        with tempfile.TemporaryDirectory() as folder:
            written = write_head(Path(folder) / "head", plain.weights.model, layers=head)
            plan["drafter"] = read_head(written, plain.weights.model).spec
        if target == "mlx":  # whose files do not depend on it
            return plain._replace(plan=plain.plan.model_copy(update={"drafter": plan["drafter"]}))
    if target == "onnx":
        from onnx_models import onnx_model

        return Model(target, *onnx_model(family, recipe, adapter_rank=adapter_rank, config=config, **plan))
    if target == "executorch":
        from executorch_models import program

        weights, chosen, files = program(family, recipe, config=json.dumps(config or {}), **plan)
        return Model(target, chosen, files, weights, files / "model")
    made = Model(target, *import_module(f"{target}_models").made(family, recipe, json.dumps(config or {}), **plan))
    return made._replace(plan=made.plan.model_copy(update={"adapter_rank": adapter_rank}))


def apart(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The largest difference, as a share of the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def spaced(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Set the least tokens between two checkpoints of a recurrent part, which capabilities state too."""
    monkeypatch.setattr(recurrent, "LEAST_TOKENS", tokens)
    if find_spec("onnxruntime"):
        from edgekit_onnx.capabilities import capabilities

        monkeypatch.setattr("edgekit_onnx.engine.capabilities", capabilities.__wrapped__)
