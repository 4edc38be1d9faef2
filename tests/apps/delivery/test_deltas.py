"""Updates of the demo model in which one linear changed fetch little more than that linear."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgekit
from edgekit import plugins
from edgekit.contracts.neutral import NeutralWeights
from examples.benchmarks.delivery_figures import packed, update_of

pytestmark = [pytest.mark.quantize, pytest.mark.slow]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> NeutralWeights:
    folder = tmp_path_factory.mktemp("weights")
    return edgekit.quantize("demo", "s4-g32", folder / "demo", effort="quick", store=folder / "store")


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("onnx", marks=pytest.mark.onnx),  # queries, keys and values are one tensor of its graphs
        pytest.param("mlx", marks=pytest.mark.mlx),
        pytest.param("llamacpp", marks=pytest.mark.llamacpp),
    ],
)
def test_a_changed_linear_costs_at_most_half_more_than_its_bytes(
    weights: NeutralWeights, tmp_path: Path, target: str
) -> None:
    missing = plugins.load_target(target).missing()
    if missing is not None:
        pytest.skip(missing)
    plan = edgekit.plan(weights.folder, target=target, context=512, recipe="s4-g32")
    base = packed(plan, weights, tmp_path / "base")
    for number, name in enumerate(("layers.1.self_attn.k_proj", "layers.1.mlp.gate_proj")):
        update = update_of(name, plan, weights, base, tmp_path / str(number))
        assert update.own_bytes > 20_000, name
        # onnx measures the steps of its 8-bit cache again: a byte each, so 1.7 kB for the demo.
        assert update.own_bytes <= update.fetched_bytes <= update.own_bytes + 2_500, (name, update)
        assert update.times_own <= 1.5, (name, update)
