"""The self-check: correct files pass on every target, and each of five planted faults is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from real_files import fetched

pytest.importorskip("torch")

from edgekit import plugins
from edgekit.artifact.self_check import CHECKED_TOKENS, checked_tokens, compare, self_check
from edgekit.contracts.engine import Engine
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import named_recipe
from edgekit.contracts.target import Target
from edgekit.errors import TargetFailed
from edgekit.model.source import open_source
from edgekit.model.spec import ModelSpec
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.quant.pipeline import neutral_weights, no_progress
from edgekit.testing.real_models import gemma3, smollm2

pytestmark = pytest.mark.quantize
TARGETS = [
    pytest.param("onnx", marks=pytest.mark.onnx),
    pytest.param("mlx", marks=pytest.mark.mlx),
    pytest.param("llamacpp", marks=pytest.mark.llamacpp),
    pytest.param("executorch", marks=[pytest.mark.executorch, pytest.mark.slow]),
]
# Programs take long to lower, so executorch is checked with the smaller model.
MODELS = {"onnx": "demo", "mlx": "demo", "llamacpp": "demo", "executorch": "demo-draft"}
DEVICES = {"onnx": "laptop-x86-8gb", "llamacpp": "laptop-x86-8gb", "mlx": "macbook-m4-16gb", "executorch": "pixel-9"}


class Faulty:
    """Neutral weights with a fault: other names or other arrays."""

    def __init__(
        self,
        weights: NeutralWeights,
        name: Callable[[str], str] = lambda name: name,
        change: Callable[[str, str, Any], Any] = lambda kind, module, values: values,
        model: ModelSpec | None = None,
    ) -> None:
        self._weights, self._name, self._change = weights, name, change
        self.model = model or weights.model

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._weights, attribute)
        if attribute not in ("packed", "integers", "scales", "floats", "dequantised", "tensor", "place"):
            return found

        def read(module: str, rows: Any = None) -> Any:
            values = found(self._name(module))
            values = self._change(attribute, module, values)
            return values if rows is None else values[rows]

        return read


class Mistaken:
    """A target whose engine uses another plan, because mlx reads from the plan what its files do not contain."""

    def __init__(self, target: Target, faulty: Plan) -> None:
        self._target, self._faulty = target, faulty

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> Engine:
        return self._target.open(self._faulty, files, exact=exact)


def permuted(kind: str, module: str, values: Any) -> Any:
    """The rows of the key projection in the order of another rope layout."""
    if kind in ("packed", "integers", "scales") and module.endswith("k_proj"):
        return values.reshape(-1, 2, 16, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return values


def scales_shifted(kind: str, module: str, values: Any) -> Any:
    return np.roll(values, 1, axis=1) if kind == "scales" and module.endswith("layers.1.mlp.up_proj") else values


def norms_raised(kind: str, module: str, values: Any) -> Any:
    """Norms as a model with an offset has them, for which an engine without one then lacks it."""
    return values + 1 if "norm" in module else values


def layers_swapped(name: str) -> str:
    swapped = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    return next((name.replace(one, other) for one, other in swapped.items() if one in name), name)


def with_model(plan: Plan, weights: NeutralWeights, **changes: Any) -> tuple[Plan, Faulty]:
    """Another model in the plan and in the weights: targets read it from either."""
    model = plan.model.model_copy(update=changes)
    return plan.model_copy(update={"model": model}), Faulty(weights, model=model)


def other_base(plan: Plan, weights: NeutralWeights) -> tuple[Plan, Faulty]:
    ropes = {name: rope.model_copy(update={"theta": rope.theta / 10}) for name, rope in plan.model.ropes.items()}
    return with_model(plan, weights, ropes=ropes)


FAULTS: dict[str, Callable[[Plan, NeutralWeights], tuple[Plan, Any]]] = {
    "wrong permutation": lambda plan, weights: (plan, Faulty(weights, change=permuted)),
    "wrong rope base": other_base,
    "missing norm offset": lambda plan, weights: (plan, Faulty(weights, change=norms_raised)),
    "swapped layers": lambda plan, weights: (plan, Faulty(weights, layers_swapped)),
    "wrong scale group": lambda plan, weights: (plan, Faulty(weights, change=scales_shifted)),
}


class Made(NamedTuple):
    """A target, and the plan and weights that it exports."""

    target: Target
    plan: Plan
    weights: NeutralWeights


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    @cache
    def weights_of(model: str | Path) -> NeutralWeights:
        return neutral_weights(open_source(model, need_weights=True), named_recipe("s4-g32"), progress=no_progress)

    def made(target: str, model: str | Path | None = None) -> Made:
        model = model or MODELS[target]
        wish = PlanRequest(recipe=named_recipe("s4-g32"), target=target, context=256)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EDGEKIT_HOME", str(tmp_path_factory.mktemp("home")))
            plan = make_plans(model, [DEVICES[target]], wish)[0]
            return Made(plugins.load_target(target), plan, weights_of(model))

    return made


@pytest.fixture(scope="module", params=[smollm2, gemma3])
def real_file(request: pytest.FixtureRequest) -> Path:
    return fetched(request.param)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own store, so that programs lowered for correct weights are not reused for faulty ones."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    (tmp_path / "files").mkdir()


@pytest.mark.parametrize("target", TARGETS)
def test_correct_files_pass_with_their_distance(make: Callable[..., Made], tmp_path: Path, target: str) -> None:
    made = make(target)
    made.target.export(made.plan, made.weights, tmp_path / "files", no_progress)
    found = self_check(*made, tmp_path / "files", no_progress)
    assert "KL 0.0" in found and f"on {CHECKED_TOKENS} tokens" in found and "read back bit for bit" in found


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_planted_fault_is_refused(make: Callable[..., Made], tmp_path: Path, target: str, fault: str) -> None:
    assert_refused(make(target), fault, tmp_path / "files")


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("target", [each for each in TARGETS if "executorch" not in each.values])  # minutes each there
def test_a_fault_planted_in_a_real_model_is_refused(
    make: Callable[..., Made], real_file: Path, tmp_path: Path, target: str, fault: str
) -> None:
    assert_refused(make(target, real_file), fault, tmp_path / "files")


@pytest.mark.onnx
def test_an_interruption_does_not_wait_for_the_reference(
    make: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    def reference(weights: object, plan: object, tokens: object, observe: Callable[[str, Any], None]) -> None:
        for _ in range(600):  # linears of a large model
            try:
                observe("a linear", None)
            except CancelledError:
                ended.append(True)
                raise
            time.sleep(0.05)
        ended.append(False)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgekit.artifact.self_check.reference_logits", reference)
    monkeypatch.setattr("edgekit.artifact.self_check._read_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        self_check(*make("onnx"), tmp_path / "files", no_progress)
    assert ended == [True]


def assert_refused(made: Made, fault: str, files: Path) -> None:
    plan, weights = FAULTS[fault](made.plan, made.weights)
    made.target.export(plan, weights, files, no_progress)
    mistaken = cast("Target", Mistaken(made.target, plan))
    with pytest.raises(TargetFailed, match=r"the self-check failed|was packed wrongly"):
        self_check(mistaken, made.plan, made.weights, files, no_progress)


def test_constant_logit_shift_gives_zero_kl() -> None:
    rows = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    shifted = compare(rows + 5.0, rows)
    assert shifted.kl < 1e-9 and shifted.same_top == 1.0 and shifted.error > 1.0


def test_checked_tokens_are_text_or_spread_over_the_vocabulary(tmp_path: Path) -> None:
    plan = make_plans("demo", ["laptop-x86-8gb"])[0]
    text, spread = checked_tokens(plan, open_source("demo").folder), checked_tokens(plan, tmp_path)
    assert len(text) == len(spread) == CHECKED_TOKENS and text != spread
    assert max(text + spread) < plan.model.vocab_size
