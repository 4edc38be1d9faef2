"""A reranker that answers yes or no scores on every target that runs its language model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_rerankers import qwen3_scores, qwen3_tokens, write_qwen3_reranker

import edgekit
from edgekit.artifact.export import export
from edgekit.contracts.recipe import named_recipe
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.plugins import load_target

pytestmark = [pytest.mark.quantize, pytest.mark.slow]

QUERY, DOCUMENTS = "where is the cat", ["the cat sat on the mat. " * 3, "a", "stop the cat"]


@pytest.mark.parametrize(
    ("target", "recipe", "allowed"),
    [
        pytest.param("mlx", "float16", 0.002, marks=pytest.mark.mlx),
        pytest.param("executorch", "s8", 0.03, marks=pytest.mark.executorch),
        pytest.param("llamacpp", "s8", 0.03, marks=pytest.mark.llamacpp),
    ],
)
def test_scores_are_near_those_of_transformers(
    target: str, recipe: str, allowed: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := load_target(target).missing():
        pytest.skip(missing)
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    model = write_qwen3_reranker(tmp_path / "qwen3-reranker-tiny", max_position_embeddings=1024)
    expected = qwen3_scores(model, [qwen3_tokens(model, QUERY, document) for document in DOCUMENTS])
    wish = PlanRequest(recipe=named_recipe(recipe), target=target, context=700)
    artifact = export(make_plans(str(model), ["this"], wish)[0], tmp_path / "artifact").folder
    with edgekit.open(artifact) as runtime:
        found = runtime.rerank(QUERY, DOCUMENTS)
    assert [each.score for each in sorted(found, key=lambda each: each.index)] == pytest.approx(expected, abs=allowed)
    assert max(expected) - min(expected) > allowed
