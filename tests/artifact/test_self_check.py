"""The self-check: correct files pass on every target in every format, and each planted fault is refused."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import family_models as models
import numpy as np
import outliers
import pytest
from real_files import fetched

pytest.importorskip("torch")

from edgekit import plugins
from edgekit.artifact.read_back import read_back
from edgekit.artifact.self_check import CHECKED_TOKENS, checked_tokens, compare, self_check
from edgekit.common.cores import UsableCores
from edgekit.common.progress import no_progress
from edgekit.contracts.engine import Chunk, Engine
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import Format, named_recipe
from edgekit.contracts.target import Target
from edgekit.errors import TargetFailed
from edgekit.model.source import open_source
from edgekit.model.spec import ModelSpec
from edgekit.planner.make import make_plans
from edgekit.planner.request import PlanRequest
from edgekit.quant.pipeline import neutral_weights
from examples.small_models import gemma3, smollm2

pytestmark = pytest.mark.quantize
TARGETS = [
    pytest.param("onnx", marks=pytest.mark.onnx),
    pytest.param("mlx", marks=pytest.mark.mlx),
    pytest.param("llamacpp", marks=pytest.mark.llamacpp),
    pytest.param("executorch", marks=[pytest.mark.executorch, pytest.mark.slow]),
]
INTEGERS = ("s8", "s4-g32", "s4-g128", "balanced")
FORMATS = {
    "onnx": ("float32", "float16", *INTEGERS),
    "mlx": ("float16", *INTEGERS, "small", "mxfp4"),
    "llamacpp": ("float32", "float16", *INTEGERS, "gguf-q4_k_m"),
    "executorch": ("float32", *INTEGERS),
}
# Of each target, every other format than the usual one. Programs take long to lower.
OTHERS = [
    pytest.param(*target.values, recipe, marks=[*target.marks, pytest.mark.slow, *more])
    for target in TARGETS
    for more in [[pytest.mark.long] if "executorch" in target.values else []]
    for recipe in FORMATS[str(target.values[0])]
    if recipe != "s4-g32"
]
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
    """A target whose engine uses another plan, because mlx reads from the plan what its files do not contain.

    `read` changes what it reads back, and `damages` the scales of narrow caches.
    """

    def __init__(
        self,
        target: Target,
        faulty: Plan,
        read: Callable[[list[Any]], list[Any]] = lambda read: read,
        *,
        damages: bool = False,
    ) -> None:
        self._target, self._faulty, self._read, self._damages = target, faulty, read, damages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def open(self, plan: Plan, files: Path, *, exact: bool = False) -> Engine:
        engine = self._target.open(self._faulty, files, exact=exact)
        return cast("Engine", Damaging(engine)) if self._damages else engine

    def weights(self, plan: Plan, files: Path) -> Iterator[Any]:
        yield from self._read(list(self._target.weights(plan, files)))


class Damaging:
    """An engine whose narrow caches have other steps than they were written with, by a factor of four."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, chunks: Sequence[Chunk]) -> list[Any]:
        found = self._engine.forward(chunks)
        state: Any = chunks[0].state
        if state.storage.kv_bits < 16 and state.length == len(chunks[0].tokens):
            segment = state.save(0, state.length)
            for array in segment.arrays:
                if array.dtype == np.uint8:  # llama.cpp's blocks of 32, each after its scale
                    halves = array.reshape(-1, 34 if state.storage.kv_bits == 8 else 18)[:, :2]
                    halves[:] = (np.ascontiguousarray(halves).view(np.float16) * np.float16(4)).view(np.uint8)
                elif array.dtype == np.int8 and state.storage.kv_bits == 8 and array.shape[-1] > 1:
                    array >>= 2
                elif array.dtype.kind == "f":
                    array *= 4
            state.rewind(state.length)
            state.restore(segment)
        return found


def permuted(kind: str, module: str, values: Any) -> Any:
    """The rows of the key projection in the order of another rope layout."""
    if module.removesuffix(".weight").endswith("k_proj"):
        return values.reshape(-1, 2, 16, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return values


def scales_shifted(kind: str, module: str, values: Any) -> Any:
    return (
        np.roll(values, 1, axis=-1 - (values.shape[-1] == 1)) if kind == "scales" and ".1.mlp.up" in module else values
    )


def norms_raised(kind: str, module: str, values: Any) -> Any:
    """Norms as a model with an offset has them, for which an engine without one then lacks it."""
    return values + 1 if "norm" in module else values


def biases_dropped(kind: str, module: str, values: Any) -> Any:
    return values * 0 if module.endswith("v_proj.bias") else values


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
    "missing bias": lambda plan, weights: (plan, Faulty(weights, change=biases_dropped)),
    "wrong scale group": lambda plan, weights: (plan, Faulty(weights, change=scales_shifted)),
}


class Made(NamedTuple):
    """A target, and the plan and weights that it exports."""

    target: Target
    plan: Plan
    weights: NeutralWeights


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """Plans and weights of the smaller bundled model with biases, or of `model`."""
    usual = outliers.biased(tmp_path_factory.mktemp("models") / "biased", 3.0, "demo-draft")

    @cache
    def weights_of(model: Path, recipe: str) -> NeutralWeights:
        chosen = named_recipe("float32" if named_recipe(recipe).is_native() else recipe)
        return neutral_weights(open_source(model, need_weights=True), chosen, progress=no_progress)

    def made(target: str, recipe: str = "s4-g32", model: Path = usual, kv_bits: int | None = None) -> Made:
        wish = PlanRequest(recipe=named_recipe(recipe), target=target, context=256, kv_bits=kv_bits)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EDGEKIT_HOME", str(tmp_path_factory.mktemp("home")))
            plan = make_plans(str(model), [DEVICES[target]], wish)[0].model_copy(update={"threads": 1})
            weights = weights_of(model, recipe)
            if not plan.recipe.is_native():
                plan = plan.model_copy(update={"recipe": weights.recipe})
            return Made(plugins.load_target(target), plan, weights)

    return made


@pytest.fixture(scope="module", params=[smollm2, gemma3])
def real_file(request: pytest.FixtureRequest) -> Path:
    return fetched(request.param)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own store, so that programs lowered for correct weights are not reused for faulty ones."""
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    (tmp_path / "files").mkdir()


@pytest.mark.parametrize(
    ("target", "recipe"), [*[pytest.param(*t.values, "s4-g32", marks=t.marks) for t in TARGETS], *OTHERS]
)
def test_correct_files_pass_with_their_distance(
    make: Callable[..., Made], tmp_path: Path, target: str, recipe: str
) -> None:
    made = make(target, recipe)
    made.target.export(made.plan, made.weights, tmp_path / "files", no_progress)
    found = self_check(*made, tmp_path / "files", no_progress).summary
    least = "KL 0." if made.plan.recipe.is_native() else "KL 0.0"
    assert least in found and f"on {CHECKED_TOKENS} tokens" in found
    assert "read back" in found and "not read back" not in found


@pytest.mark.parametrize("target", TARGETS[:2])
def test_reading_back_takes_one_copy_of_the_largest_matrix(
    make: Callable[..., Made], tmp_path: Path, target: str
) -> None:
    models.write_model(tmp_path / "model", "llama", {**models.SMALL, "vocab_size": 250_000})
    made = make(target, model=tmp_path / "model")
    made.target.export(made.plan, made.weights, tmp_path / "files", no_progress)
    tracemalloc.start()
    try:
        assert read_back(*made, tmp_path / "files").is_read
        assert tracemalloc.get_traced_memory()[1] < 1.5 * 250_000 * 64 * 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_planted_fault_is_refused(make: Callable[..., Made], tmp_path: Path, target: str, fault: str) -> None:
    assert_refused(make(target), fault, tmp_path / "files")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("target", "recipe"), OTHERS)
def test_a_planted_fault_is_refused_in_every_format(
    make: Callable[..., Made], tmp_path: Path, target: str, recipe: str, fault: str
) -> None:
    made = make(target, recipe)
    if fault == "wrong scale group" and not any(f.kind in ("s4", "s8") for f in formats(made.plan)):
        pytest.skip("no scales of edgekit's own")
    if fault == "swapped layers" and recipe == "balanced":
        pytest.skip("its layers differ in formats, so that no target can write them")
    assert_refused(made, fault, tmp_path / "files")


@pytest.mark.parametrize("fault", ["missing", "doubled"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_matrix_that_is_not_read_back_once_is_refused(
    make: Callable[..., Made], tmp_path: Path, target: str, fault: str
) -> None:
    made = make(target)
    made.target.export(made.plan, made.weights, tmp_path / "files", no_progress)

    def read(matrices: list[Any]) -> list[Any]:
        one = next(pair for pair in matrices if "o_proj" in pair[0])
        return [*matrices, one] if fault == "doubled" else [pair for pair in matrices if pair is not one]

    mistaken = cast("Target", Mistaken(made.target, made.plan, read))
    said = "packed twice" if fault == "doubled" else "model.layers.0.self_attn.o_proj.weight cannot be found"
    with pytest.raises(TargetFailed, match=said):
        self_check(mistaken, made.plan, made.weights, tmp_path / "files", no_progress)


@pytest.mark.parametrize(
    ("target", "kv_bits"),
    [
        pytest.param("onnx", None, marks=pytest.mark.onnx),
        pytest.param("mlx", None, marks=pytest.mark.mlx),
        pytest.param("llamacpp", None, marks=pytest.mark.llamacpp),
        pytest.param("executorch", 8, marks=[pytest.mark.executorch, pytest.mark.slow]),
    ],
)
def test_wrong_steps_of_a_narrow_cache_are_refused(
    make: Callable[..., Made], tmp_path: Path, target: str, kv_bits: int | None
) -> None:
    made = make(target, kv_bits=kv_bits)
    made.target.export(made.plan, made.weights, tmp_path / "files", no_progress)
    mistaken = cast("Target", Mistaken(made.target, made.plan, damages=True))
    with pytest.raises(TargetFailed, match="the self-check failed"):
        self_check(mistaken, made.plan, made.weights, tmp_path / "files", no_progress)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "missing bias"])
@pytest.mark.parametrize("target", [each for each in TARGETS if "executorch" not in each.values])  # minutes each there
def test_a_fault_planted_in_a_real_model_is_refused(
    make: Callable[..., Made], real_file: Path, tmp_path: Path, target: str, fault: str
) -> None:
    assert_refused(make(target, model=real_file), fault, tmp_path / "files")


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
    monkeypatch.setattr("edgekit.artifact.self_check.read_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        self_check(*make("onnx"), tmp_path / "files", no_progress)
    assert ended == [True]


@pytest.mark.onnx
def test_the_check_takes_no_more_threads_than_this_machine_has(
    make: Callable[..., Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, threads = make("onnx"), list[int]()
    made.target.export(made.plan, made.weights, tmp_path / "files", no_progress)
    opened = type(made.target).open

    def noted(target: Target, plan: Plan, files: Path, **options: Any) -> Engine:
        threads.append(plan.threads)
        return opened(target, plan, files, **options)

    monkeypatch.setattr(type(made.target), "open", noted)
    monkeypatch.setattr("edgekit.artifact.self_check.usable_cores", lambda: UsableCores(1, "a mask of one core"))
    self_check(made.target, made.plan.model_copy(update={"threads": 8}), made.weights, tmp_path / "files", no_progress)
    assert threads and set(threads) == {1}


def formats(plan: Plan) -> set[Format]:
    return {plan.recipe.format_of(tensor) for tensor in plan.model.tensors() if tensor.is_linear}


def assert_refused(made: Made, fault: str, files: Path) -> None:
    plan, weights = FAULTS[fault](made.plan, made.weights)
    made.target.export(plan, weights, files, no_progress)
    mistaken = cast("Target", Mistaken(made.target, plan))
    with pytest.raises(TargetFailed, match=r"the self-check failed|packed wrongly"):
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
