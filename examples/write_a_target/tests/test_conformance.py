"""The target keeps every promise of edgekit's contracts. Run this in an environment with the package installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgekit_numpy import NumpyTarget

from edgekit import plugins
from edgekit.common.content_store import ContentStore
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import named_recipe
from edgekit.device.load import load_profile
from edgekit.model.source import open_source
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.quant.pipeline import neutral_weights
from edgekit.testing import check_engine, check_export, check_target, check_weights

DEVICE = "numpy-laptop"
TOLERANCE = 1e-5  # of the largest logit: what float32 sums in another order differ by


@pytest.fixture(scope="module", params=["s8", "float32"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NeutralWeights:
    """Neutral weights of the smaller bundled model."""
    store = ContentStore(tmp_path_factory.mktemp("store"))
    return neutral_weights(open_source("demo-draft", need_weights=True), named_recipe(request.param), store=store)


@pytest.fixture(scope="module")
def plan(weights: NeutralWeights) -> Plan:
    request = PlanRequest(
        target="numpy", recipe=weights.recipe, context=128, sequences=3
    )  # the suite needs 96 tokens and two states
    return make_plans("demo-draft", [DEVICE], request)[0].model_copy(update={"chunk_tokens": 16})


@pytest.fixture
def files(plan: Plan, weights: NeutralWeights, tmp_path: Path) -> Path:
    NumpyTarget().export(plan, weights, tmp_path, lambda done, total, what: None)
    return tmp_path


def test_target_is_registered() -> None:
    assert isinstance(plugins.load_target("numpy"), NumpyTarget)


def test_target_passes_the_suite() -> None:
    check_target(NumpyTarget(), [load_profile(DEVICE), load_profile("iphone-16-pro")])


def test_engine_passes_the_suite(plan: Plan, files: Path) -> None:
    check_engine(lambda: NumpyTarget().open(plan, files), exact=False, tolerance=TOLERANCE, sequences=20)


def test_engine_in_exact_mode_passes_the_suite_bit_for_bit(plan: Plan, files: Path) -> None:
    check_engine(lambda: NumpyTarget().open(plan, files, exact=True), exact=True, tolerance=0.0, sequences=20)


def test_export_passes_the_suite(plan: Plan, weights: NeutralWeights) -> None:
    check_export(NumpyTarget(), plan, weights, exact=False, tolerance=TOLERANCE, sequences=5)


def test_files_hold_the_neutral_weights_bit_for_bit(plan: Plan, weights: NeutralWeights, files: Path) -> None:
    check_weights(NumpyTarget(), plan, files, weights)
