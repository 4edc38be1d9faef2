"""What tests of sealed heads share: plans, prompts, settings, and a runtime whose head drafts in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import runtimes
import tiny_models

from edgekit.artifact.artifact import Artifact
from edgekit.artifact.sealed_head import open_head
from edgekit.contracts.recipe import named_recipe
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.runtime.speculation.head_decoder import HeadDecoder
from edgekit.runtime.speculation.head_drafter import HeadDrafting
from edgekit.testing.drafting import FixedLengthDrafting

TARGETS = {"onnx": "onnxruntime", "mlx": "mlx.core", "executorch": "executorch"}  # and the library that runs it
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}
KEPT: dict[str, dict[str, Any]] = {"everything": {}, "a window": {"window": 24, "sinks": 3}}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 4.0, "seed": 4},
    "penalised": {"temperature": 0.8, "top_k": 30, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 6},
}


def words(count: int, seed: int) -> str:
    draw = np.random.default_rng(seed)
    return " ".join(runtimes.WORDS[index] for index in draw.integers(0, len(runtimes.WORDS), count))


def planned(model: Path, head: Path, **asked: Any) -> Any:
    request = PlanRequest(
        **{
            "recipe": named_recipe("s4-g32"),
            "target": "onnx",
            "context": 128,
            "sequences": 3,
            "drafter": str(head),
            **asked,
        }
    )
    return make_plans(str(model), [tiny_models.DEVICE], request)[0]


def always(artifact: Artifact) -> FixedLengthDrafting:
    """A runtime whose sealed head drafts in every step."""
    model = HeadDecoder(open_head(artifact.plan, artifact.folder))
    return FixedLengthDrafting(HeadDrafting(model, capacity=128, one_s=1.0, block_token_s=1.0, tokens=4))
