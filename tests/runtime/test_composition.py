"""Any window, drafter, prefix reuse, batch and format give the tokens of the plain loop under the same policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from engines import make_model
from runtimes import codec
from speculating import SOURCES

from edgekit.contracts.engine import Chunk, Engine
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.errors import Unsupported
from edgekit.runtime.runtime import Runtime
from edgekit.testing import FakeEngine, write_adapter

SIZE = codec().vocabulary
POLICIES = {
    "full": KVEvictionPolicy(),
    "window": KVEvictionPolicy.of(32),
    "window and sinks": KVEvictionPolicy.of(32, 4),
    "scored window": KVEvictionPolicy.of(40, 4, "scored"),
    "window by attention": KVEvictionPolicy.of(40, 4, "snapkv"),
}
DRAFTERS = (None, "prompt lookup", "a draft model", "early exit", "auto")
PROMPTS = ([5, 6, 7, 5, 6, 7, 5, 6, 7, 8], [5, 6, 7, 5, 6, 90, 91, 92], list(range(60, 75)))
SHAPES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "structured and sampled": {
        "regex": r"([a-c]{2} ){14}",
        "temperature": 1.0,
        "top_p": 0.95,
        "frequency_penalty": 0.2,
    },
}
WAYS = tuple(product((0, 1 << 20), (False, True)))  # bytes of prefixes, and whether others run with it
ONE_WAY = ((1 << 20, True),)
TOKENS = 40


class Kind(NamedTuple):
    """An engine that is opened as often as the test likes, in exact mode or not."""

    open: Callable[[bool], Engine]
    kv_bits: int
    ways: tuple[tuple[int, bool], ...] = WAYS  # the slower engines get one, and onnx several in one policy
    adapters: tuple[Path, ...] = ()


def fake(folder: Path) -> Kind:
    for seed in (1, 2):
        (folder / f"{seed}").mkdir()
        (folder / f"{seed}/adapter.json").write_text(json.dumps({"seed": seed}))
    adapters = (folder / "1", folder / "2")
    return Kind(lambda exact: FakeEngine(vocabulary=SIZE, max_states=6), 16, adapters=adapters)


def on(target: str, held_bits: int, **plan: Any) -> Any:
    def make(folder: Path) -> Kind:
        fast = {"level": 4} if target == "onnx" else {}
        model = make_model(
            target, "llama", config={"vocab_size": SIZE, "num_hidden_layers": 2, "head_dim": 32}, context=96,
            chunk_tokens=16, sequences=6, exits=(1,), **fast, **plan,
        )  # fmt: skip
        attends = {"cache": POLICIES["window by attention"]} if target == "onnx" else {}
        seeds = (3, 4) if "adapter_rank" in plan else ()
        adapters = (write_adapter(folder / str(seed), model.plan.model, seed=seed, rank=seed) for seed in seeds)
        ways = WAYS if target == "onnx" else ONE_WAY
        return Kind(lambda exact: model.open(exact=exact, **attends), held_bits, ways, tuple(adapters))

    name = target if held_bits == 32 else f"{target}, {held_bits} bits"
    slow = [] if name == "onnx" else [pytest.mark.slow]
    return pytest.param(make, id=name, marks=[getattr(pytest.mark, target), pytest.mark.quantize, *slow])


ALL = [
    pytest.param(fake, id="fake"), on("onnx", 32, adapter_rank=4), on("onnx", 8), on("executorch", 32),
    on("executorch", 8, kv_bits=8), on("mlx", 32), on("mlx", 8, adapter_rank=4), on("mlx", 4),
]  # fmt: skip
KINDS = {each.id: each for each in ALL}
ROUNDING = [KINDS[name] for name in ("onnx", "onnx, 8 bits", "executorch", "executorch, 8 bits")]
ADAPTED = [KINDS[name] for name in ("fake", "onnx", "mlx, 8 bits")]


# Every policy in one width on each target; other widths differ in the engine alone, whose own suite has them.
WIDTHS = {
    "onnx, 8 bits": "window and sinks",
    "executorch, 8 bits": "full",
    "mlx, 8 bits": "full",
    "mlx, 4 bits": "window",
}
ROWS = [
    pytest.param(*kind.values, POLICIES[name], id=f"{kind.id}-{name}", marks=kind.marks)
    for kind in ALL
    for name in POLICIES
    if WIDTHS.get(str(kind.id), name) == name and (name != "window" or kind.id in ("fake", "mlx, 4 bits"))
]


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("engine")
    return request.param(folder)


def opened(
    kind: Kind, policy: KVEvictionPolicy, drafter: str | None, prefix_bytes: int, *, exact: bool = True
) -> Runtime:
    engine = kind.open(exact)
    storage = KVCacheConfig(capacity_tokens=policy.window or 96, kv_bits=kind.kv_bits)
    source = SOURCES[drafter](engine, kind.open(exact), storage, []) if drafter else None
    return Runtime(
        engine, codec(), kv_config=storage, policy=policy, sequences=3, chunk_tokens=16, drafting=source,
        prefix_bytes=prefix_bytes,
    )  # fmt: skip


def can_score(kind: Kind, policy: KVEvictionPolicy) -> bool:
    engine = kind.open(False)
    engine.close()
    return policy.keep in engine.capabilities.scorers and bool(policy.widths((kind.kv_bits,)))


def answers(
    runtime: Runtime, shape: dict[str, Any], *, with_company: bool, adapters: Sequence[str | None] = (None, None, None)
) -> list[tuple[int, ...]]:
    """The texts of all prompts, each with its adapter."""
    options = {"max_tokens": TOKENS, "ignore_eos": True, "seed": 3, **shape}
    asked = zip(PROMPTS, adapters, strict=True)
    if with_company:
        streams = [runtime.submit(prompt, adapter=adapter, **options) for prompt, adapter in asked]
        return [stream.answer().tokens for stream in streams]
    return [runtime.complete(prompt, adapter=adapter, **options).tokens for prompt, adapter in asked]


@pytest.mark.parametrize(("kind", "policy"), ROWS, indirect=["kind"])
def test_all_features_compose(kind: Kind, policy: KVEvictionPolicy) -> None:
    if policy.is_scored and not can_score(kind, policy):
        with pytest.raises(Unsupported, match="keep: "):
            opened(kind, policy, None, 0)
        return
    with opened(kind, policy, None, 0) as runtime:
        plain = {name: answers(runtime, shape, with_company=False) for name, shape in SHAPES.items()}
        assert (runtime.metrics().evictions > 0) == (policy.window is not None)
    for drafter, prefix_bytes in product(DRAFTERS, (0, 1 << 20)):
        is_slow = drafter == "auto" or (kind.kv_bits == 32 and policy is not POLICIES["window and sinks"])
        ways = ONE_WAY if is_slow else kind.ways
        companies = [company for each, company in ways if each == prefix_bytes]
        if not companies:
            continue
        with opened(kind, policy, drafter, prefix_bytes) as runtime:
            for (name, shape), company in product(SHAPES.items(), companies):
                found = answers(runtime, shape, with_company=company)
                assert found == plain[name], (drafter, prefix_bytes, name, company)
            metrics = runtime.metrics()
        assert drafter is None or metrics.proposed > 0
        assert (metrics.cached_tokens > 0) == (prefix_bytes > 0)


@pytest.mark.parametrize("kind", ADAPTED, indirect=True)
@pytest.mark.parametrize("policy", [POLICIES["full"], POLICIES["window and sinks"]], ids=["full", "window and sinks"])
def test_adapters_compose_with_all_features(kind: Kind, policy: KVEvictionPolicy) -> None:
    """Requests with different adapters, or none, run together and get the tokens that each gets alone."""
    names = {path.name: path for path in kind.adapters}
    adapters = (None, *names)

    def adapted(drafter: str | None, prefix_bytes: int) -> Runtime:
        runtime = opened(kind, policy, drafter, prefix_bytes)
        for name, path in names.items():
            runtime.load_adapter(name, path)
        return runtime

    with adapted(None, 0) as runtime:
        plain = {name: answers(runtime, shape, with_company=False, adapters=adapters) for name, shape in SHAPES.items()}
        assert plain["greedy"] != answers(runtime, {}, with_company=False)
    for drafter in (None, "early exit", "auto"):
        with adapted(drafter, 1 << 20) as runtime:
            for name, shape in SHAPES.items():
                found = answers(runtime, shape, with_company=True, adapters=adapters)
                assert found == plain[name], (drafter, name)
            assert runtime.metrics().cached_tokens > 0
            assert drafter is None or runtime.metrics().proposed > 0


@pytest.mark.parametrize("kind", ROUNDING, indirect=True)
def test_inexact_texts_differ_only_at_near_ties(kind: Kind) -> None:
    policy = POLICIES["window and sinks"]
    asked = {"max_tokens": TOKENS, "ignore_eos": True}
    with opened(kind, policy, None, 0, exact=False) as runtime:
        plain = [runtime.complete(prompt, logprobs=2, **asked) for prompt in PROMPTS]
        bound = 1e-4 + 2 * max(noise(runtime.engine, runtime.kv_config, each.tokens[:24]) for each in plain)
    for drafter in DRAFTERS[1:]:
        with opened(kind, policy, drafter, 1 << 20, exact=False) as runtime:
            for expected, found in zip(plain, answers(runtime, {}, with_company=True), strict=True):
                pairs = enumerate(zip(expected.tokens, found, strict=True))
                parted = next((place for place, (one, other) in pairs if one != other), None)
                if parted is not None:
                    first, second = expected.logprobs[parted].top
                    assert first[1] - second[1] <= bound, (drafter, parted)


def noise(engine: Engine, storage: KVCacheConfig, tokens: Sequence[int]) -> float:
    """Return the largest change of the two best tokens' margin with the number of logits in one call."""
    rows = []
    for size in (1, 2, 4, 8):
        state = engine.start(storage)
        parts = [list(tokens[start : start + size]) for start in range(0, len(tokens), size)]
        rows.append(np.concatenate([engine.forward([Chunk(state, part, len(part))])[0].copy() for part in parts]))
        state.close()
    likeliest = np.argsort(rows[0], axis=1)[:, -2:]
    margins = [np.diff(np.take_along_axis(each, likeliest, axis=1), axis=1) for each in rows]
    return max(float(np.abs(margin - margins[0]).max()) for margin in margins[1:])
