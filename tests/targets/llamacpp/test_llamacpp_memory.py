"""Predicted buffers are those that llama.cpp logs itself, in both modes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import llamacpp_models
from edgekit_llamacpp import library, structs
from edgekit_llamacpp.engine import LlamaCppEngine
from edgekit_llamacpp.offers import offer

from edgekit.common.units import MIB
from edgekit.contracts.plan import Plan
from edgekit.device.load import load_profile
from edgekit.planner.memory import explain
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
    made = llamacpp_models.made(family, context=context, sequences=sequences, chunk_tokens=512)
    plan = made.plan
    facts = offer(plan.model, load_profile("laptop-x86-8gb"), "cpu", plan.recipe).memory
    return plan.model_copy(update={"memory": facts.model_copy(update={"tokenizer_bytes": 0})}), made.files


@runs
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cache_and_buffers_are_as_predicted(family: str, exact: bool, logged: dict[str, float]) -> None:
    for context, sequences in ((256, 1), (1500, 1), (1024, 4)):
        plan, files = planned(family, context, sequences)
        logged.clear()
        engine = LlamaCppEngine(plan, files, exact=exact)
        engine._exact_bits.add(plan.storage.kv_bits)  # the kernels' check is not what is measured
        engine.start(plan.storage)
        config = RunConfig(kv_config=plan.storage, policy=plan.cache, sequences=sequences, exact=exact)
        estimate = estimate_of(plan, config, engine.state_bytes)
        engine.close()
        assert estimate.kv_bytes / MIB == pytest.approx(logged["KV"], abs=0.02)
        buffers = logged["compute"] + logged["output"]
        assert estimate.activation_bytes / MIB == pytest.approx(buffers, rel=0.1, abs=0.3), (context, sequences)


def test_plan_says_what_exact_mode_takes() -> None:
    plan, _ = planned("llama", 1024, 2)
    (line,) = [line for line in explain(plan) if line.startswith("activations")]
    assert "attention's masks; exact mode takes" in line
