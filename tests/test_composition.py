"""Any window, drafter, prefix reuse, company and shape give the tokens of the plain loop under the same policy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from runtimes import codec
from speculating import SOURCES

from edgekit.cache import CachePolicy, Storage
from edgekit.interfaces import Engine
from edgekit.runtime.runtime import Runtime
from edgekit.testing import FakeEngine

SIZE = codec().vocabulary
POLICIES = {"full": CachePolicy(), "window": CachePolicy.of(32), "window and sinks": CachePolicy.of(32, 4)}
DRAFTERS = (None, "prompt lookup", "a draft model", "early exit")
PROMPTS = ([5, 6, 7, 5, 6, 7, 5, 6, 7, 8], [5, 6, 7, 5, 6, 90, 91, 92], list(range(60, 75)))
SHAPES: dict[str, dict[str, Any]] = {"free": {}, "structured": {"regex": r"([a-c]{2} ){14}", "temperature": 1.0}}
TOKENS = 40


class Kind(NamedTuple):
    """An engine that is opened as often as the test likes."""

    open: Callable[[], Engine]
    kv_bits: int
    drafters: tuple[str | None, ...] = DRAFTERS


def fake(folder: Path) -> Kind:
    return Kind(lambda: FakeEngine(vocabulary=SIZE, max_states=6), 16)


def onnx(folder: Path, kv_bits: int = 32) -> Kind:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("transformers")
    import family_models as models
    from edgekit_onnx.engine import OnnxEngine
    from edgekit_onnx.export import FAST, export

    plan, weights = _planned(models, folder, exits=(1,))
    export(plan, weights, folder, models.quiet, accuracy_level=FAST)
    return Kind(lambda: OnnxEngine(plan, folder, exact=True), kv_bits)


def onnx_narrow(folder: Path) -> Kind:
    return onnx(folder, 8)


def mlx(folder: Path) -> Kind:
    pytest.importorskip("mlx.core")
    pytest.importorskip("transformers")
    import family_models as models
    from edgekit_mlx.engine import MlxEngine
    from edgekit_mlx.export import export

    plan, weights = _planned(models, folder, exits=(1,))
    plan = plan.model_copy(update={"target": "mlx"})
    export(plan, weights, folder, models.quiet)
    return Kind(lambda: MlxEngine(plan, folder, exact=True), 32)


def executorch(folder: Path) -> Kind:
    pytest.importorskip("executorch")
    pytest.importorskip("torch")
    import family_models as models
    from edgekit_executorch.engine import ExecutorchEngine
    from edgekit_executorch.export import export

    plan, weights = _planned(models, folder, backend="xnnpack", exits=(1,))
    plan = plan.model_copy(update={"target": "executorch"})
    export(plan, weights, folder, models.quiet)
    return Kind(lambda: ExecutorchEngine(plan, folder, exact=True), 32)


def _planned(models: Any, folder: Path, **plan: Any) -> tuple[Any, Any]:
    model = folder.parent / f"{folder.name}-model"
    kind, config = models.FAMILIES["llama"]
    models.write_model(model, kind, {**config, "vocab_size": SIZE, "num_hidden_layers": 2})
    weights = models.weights_of(model, "s4-g32", folder.parent / f"{folder.name}-store")
    planned = models.plan_for(weights.model, weights.recipe, context=96, chunk_tokens=16, sequences=6, **plan)
    return planned, weights


KINDS = {
    "fake": pytest.param(fake, id="fake"),
    "onnx": pytest.param(onnx, id="onnx", marks=[pytest.mark.onnx, pytest.mark.quantize]),
    "onnx, 8 bits": pytest.param(
        onnx_narrow, id="onnx, 8 bits", marks=[pytest.mark.onnx, pytest.mark.quantize, pytest.mark.slow]
    ),
    "executorch": pytest.param(
        executorch, id="executorch", marks=[pytest.mark.executorch, pytest.mark.quantize, pytest.mark.slow]
    ),
    "mlx": pytest.param(mlx, id="mlx", marks=[pytest.mark.mlx, pytest.mark.quantize, pytest.mark.slow]),
}


@pytest.fixture(scope="module", params=KINDS.values())
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("engine")
    return request.param(folder)


def opened(kind: Kind, policy: CachePolicy, drafter: str | None, prefix_bytes: int) -> Runtime:
    engine = kind.open()
    storage = Storage(capacity_tokens=policy.window or 96, kv_bits=kind.kv_bits)
    source = SOURCES[drafter](engine, kind.open(), storage, []) if drafter else None
    return Runtime(
        engine, codec(), storage=storage, policy=policy, sequences=3, chunk_tokens=16, drafting=source,
        prefix_bytes=prefix_bytes,
    )  # fmt: skip


def answers(runtime: Runtime, shape: dict[str, Any], *, with_company: bool) -> list[tuple[int, ...]]:
    options = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 3, **shape}
    if with_company:
        streams = [runtime.submit(prompt, **options) for prompt in PROMPTS]
        return [stream.answer().tokens for stream in streams]
    return [runtime.complete(prompt, **options).tokens for prompt in PROMPTS]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_everything_composes(kind: Kind, policy: CachePolicy) -> None:
    with opened(kind, policy, None, 0) as runtime:
        plain = {name: answers(runtime, shape, with_company=False) for name, shape in SHAPES.items()}
        assert (runtime.metrics().evictions > 0) == (policy.window is not None)
    for drafter, prefix_bytes in product(kind.drafters, (0, 1 << 20)):
        with opened(kind, policy, drafter, prefix_bytes) as runtime:
            for (name, shape), company in product(SHAPES.items(), (False, True)):
                found = answers(runtime, shape, with_company=company)
                assert found == plain[name], (drafter, prefix_bytes, name, company)
            metrics = runtime.metrics()
        assert drafter is None or metrics.proposed > 0
        assert (metrics.cached_tokens > 0) == (prefix_bytes > 0)
