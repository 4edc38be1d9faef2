"""The conformance suites on the mlx target: bitwise, for every kind of model and every width of the cache."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("mlx.core")

import mlx_models
from edgekit_mlx import MlxTarget
from edgekit_mlx.engine import MlxEngine

from edgekit.contracts.kv_policy import KVEvictionPolicy
from edgekit.device.load import load_profile
from edgekit.errors import Unsupported
from edgekit.testing import check_engine, check_export, check_target

pytestmark = [pytest.mark.mlx, pytest.mark.quantize]

WITH_WIDE_HEADS = "llama 3 rope, wide heads"
# Windows, no positions, fused, capped, shared.
USUAL = ("mistral with a window", "smollm3", "phi3 with longrope", "gemma2", "gemma4")
OTHERS = tuple(family for family in mlx_models.FAMILIES if family not in USUAL)


def opened(family: str, **plan: Any) -> MlxEngine:
    made = mlx_models.made(family, **plan)
    return MlxEngine(made.plan, made.files)


@pytest.mark.parametrize("family", [*USUAL, *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)])
def test_engine_passes_conformance_suite_bitwise(family: str) -> None:
    check_engine(lambda: opened(family), exact=True, tolerance=0.0, sequences=8)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", mlx_models.FAMILIES)
def test_long_random_traces(family: str) -> None:
    check_engine(lambda: opened(family), exact=True, tolerance=0.0, sequences=300)


@pytest.mark.parametrize(
    ("family", "bits"), [(WITH_WIDE_HEADS, 16), (WITH_WIDE_HEADS, 8), ("gemma2", 4), ("gpt_oss", 8)]
)
def test_quantised_caches_pass_conformance_suite_bitwise(family: str, bits: int) -> None:
    check_engine(lambda: mlx_models.holding(opened(family), bits), exact=True, tolerance=0.0, sequences=8)


def test_export_passes_target_suite() -> None:
    made = mlx_models.made(mlx_models.ONE_LAYER)
    check_export(MlxTarget(), made.plan, made.weights, exact=True, tolerance=0.0, sequences=5)


def test_one_layer_eviction_leaves_no_trace() -> None:
    check_engine(
        lambda: opened(mlx_models.ONE_LAYER), exact=True, tolerance=1e-5, memoryless=True, sequences=5
    )  # fmt: skip


def test_a_window_is_refused_where_scores_depend_on_positions() -> None:
    made = mlx_models.made("hunyuan")
    engine = MlxEngine(made.plan, made.files)
    assert not engine.capabilities.can_evict
    engine.close()
    plan = made.plan.model_copy(update={"cache": KVEvictionPolicy.of(32, 4)})
    with pytest.raises(Unsupported, match="a window of tokens is not supported for hunyuan_v1_dense"):
        MlxTarget().check(plan)


def test_offers_pass_target_suite() -> None:
    model = mlx_models.made(WITH_WIDE_HEADS).plan.model
    check_target(MlxTarget(), [load_profile("macbook-m4-16gb"), load_profile("laptop-x86-8gb")], model)
