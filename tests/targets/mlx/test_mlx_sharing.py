"""Layers that share keys and values and have inputs of their own (Gemma 4) on MLX: texts, and what is held."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx")
pytest.importorskip("transformers")

import mlx.core as mx
import mlx_models
from edgekit_mlx.engine import MlxEngine
from edgekit_mlx.offers import offer
from edgekit_mlx.weights import Weights

from edgekit.contracts.stored_weights import by_rows_bytes, stored_weight_bytes
from edgekit.contracts.token_costs import kv_bytes

pytestmark = [pytest.mark.mlx, pytest.mark.quantize]


@pytest.mark.parametrize("recipe", ["s4-g32", "float32"])
def test_the_table_of_layer_inputs_is_not_held(recipe: str) -> None:
    made = mlx_models.made("gemma4", recipe)
    model, facts = made.plan.model, offer(made.plan.model, "cpu", made.plan.recipe).memory
    table = by_rows_bytes(model, made.plan.recipe, facts)
    assert table > 0
    weights = Weights(model, made.files, numbers=mx.float32)
    assert weights.bytes == pytest.approx(stored_weight_bytes(model, made.plan.recipe, facts) - table, rel=0.01)


def test_the_cache_of_shared_layers_is_stored_once() -> None:
    made = mlx_models.made("gemma4")
    engine = MlxEngine(made.plan, made.files)
    state = engine.start(mlx_models.storage(engine, 32, 64))
    assert state.bytes == kv_bytes(made.plan.model, 64, 32, bounds_windows=False)
    assert len(state.caches) == sum(layer.stores_kv for layer in made.plan.model.layers) == 3
    engine.close()
