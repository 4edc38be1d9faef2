"""Predicted buffers are those that llama.cpp logs itself, in both modes."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from edgekit_llamacpp import library, structs
from edgekit_llamacpp.engine import LlamaCppEngine
from edgekit_llamacpp.memory import facts, memory_terms
from engines import llamacpp_model

from edgekit.artifact.export import export
from edgekit.common.footprint import private_bytes_now
from edgekit.common.units import MIB
from edgekit.contracts.engine import Chunk
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import named_recipe
from edgekit.device.load import load_profile
from edgekit.planner.make import make_plans
from edgekit.planner.memory import explain
from edgekit.planner.request import PlanRequest
from edgekit.quant.neutral_gguf import stored_bytes
from edgekit.runtime.memory.admission import RunConfig, estimate_of

pytestmark = [pytest.mark.llamacpp, pytest.mark.quantize]
runs = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
_BUFFER = re.compile(r"(KV|compute|output) buffer size += +([\d.]+) MiB")


@pytest.fixture
def logged() -> Iterator[dict[str, float]]:
    """Buffers in MiB by kind, as they are logged while engines open."""
    found: dict[str, float] = {}

    def keep(level: int, text: bytes, _: Any) -> None:
        if line := _BUFFER.search(text.decode(errors="replace")):
            found[line[1]] = found.get(line[1], 0.0) + float(line[2])

    opened = library.load()
    callback = structs.LogCallback(keep)
    opened.llama_log_set(callback, None)
    yield found
    opened.llama_log_set(opened._callback, None)


def planned(family: str, context: int, sequences: int) -> tuple[Plan, Path]:
    made = llamacpp_model(family, context=context, sequences=sequences, chunk_tokens=512)
    plan = made.plan
    stored = facts(load_profile("laptop-x86-8gb"), "cpu").model_copy(update={"tokenizer_bytes": 0})
    return plan.model_copy(update={"memory": stored}), made.files


@runs
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cache_and_buffers_are_as_predicted(family: str, exact: bool, logged: dict[str, float]) -> None:
    for context, opened, sequences in ((256, 256, 1), (1500, 1500, 1), (1024, 1024, 4), (1500, 300, 2)):
        plan, files = planned(family, context, sequences)
        logged.clear()
        engine = LlamaCppEngine(plan, files, exact=exact)
        engine._exact_bits.add(plan.storage.kv_bits)  # the kernels' check is not what is measured
        storage = plan.storage.model_copy(update={"capacity_tokens": opened})
        engine.start(storage)
        config = RunConfig(kv_config=storage, policy=plan.cache, sequences=sequences, exact=exact)
        estimate = estimate_of(plan, config, memory_terms, engine.state_bytes)
        engine.close()
        assert estimate.kv_bytes / MIB == pytest.approx(logged["KV"], abs=0.02)
        buffers = logged["compute"] + logged["output"]
        assert estimate.activation_bytes / MIB == pytest.approx(buffers, rel=0.1, abs=0.3), (context, sequences)


@runs
def test_dropped_engine_frees_its_caches() -> None:
    made = llamacpp_model("llama", context=8192, sequences=16, chunk_tokens=64)

    def open_and_forget() -> None:
        engine = LlamaCppEngine(made.plan, made.files)
        engine.start(made.plan.storage)

    open_and_forget()
    gc.collect()
    before = private_bytes_now()
    for _ in range(6):
        open_and_forget()
    gc.collect()
    size = LlamaCppEngine(made.plan, made.files).state_bytes(made.plan.storage) * 16
    # the allocator of a long process may keep about one size; six leaked caches are six sizes
    assert size > 32 * MIB and private_bytes_now() - before < 2 * size


@runs
def test_new_cache_size_replaces_unused_caches() -> None:
    made = llamacpp_model("llama", context=1024, sequences=2, chunk_tokens=64)
    engine = LlamaCppEngine(made.plan, made.files)
    first = engine.start(made.plan.storage)
    small = made.plan.storage.model_copy(update={"capacity_tokens": 200})
    assert engine.state_bytes(small) * 4 == engine.state_bytes(made.plan.storage)
    with_first = engine.start(small)  # both run
    rows = engine.forward([Chunk(first, [3, 4], 1), Chunk(with_first, [3, 4], 1)])
    assert np.abs(rows[0] - rows[1]).max() < 1e-4 * np.abs(rows[0]).max()
    first.close()
    with_first.close()
    engine.start(made.plan.storage.model_copy(update={"capacity_tokens": 600}))
    assert [cells for _, cells in engine._contexts] == [768]
    engine.close()


@runs
def test_promoted_modules_are_not_counted_as_copied(tmp_path: Path) -> None:
    """`balanced` stores some linears in 8 bits once the weights are known; only those of 4 bits are copied."""
    wish = PlanRequest(target="llamacpp", recipe=named_recipe("balanced"))
    (plan,) = make_plans("demo-draft", ["laptop-x86-8gb"], wish)
    sealed = export(plan, tmp_path / "demo").plan
    assert len(sealed.recipe.rules) > len(plan.recipe.rules)
    copied = stored_bytes(sealed.model, sealed.recipe)[1]
    assert copied < stored_bytes(plan.model, plan.recipe)[1]
    assert sealed.estimate.private_weights_bytes == pytest.approx(copied, rel=0.02)


def test_plan_explains_the_memory_of_exact_mode() -> None:
    plan, _ = planned("llama", 1024, 2)
    (line,) = [line for line in explain(plan, memory_terms) if line.startswith("activations")]
    assert "attention's masks; exact mode takes" in line
