"""Every target refuses by name what its capabilities lack, with the reason and the cure, before any work."""

from __future__ import annotations

import re
from typing import Any

import pytest
from configs import TINY

from edgekit import plugins
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.plan import Plan
from edgekit.contracts.recipe import NATIVE_RECIPES, Format, Recipe, Rule
from edgekit.errors import Unsupported
from edgekit.model.families import model_from_config
from edgekit.testing import fake_plan

S4_THROUGHOUT = Recipe(name="s4-throughout", rules=(Rule(pattern="*", format=Format(kind="s4", group=32)),))
RUNS = {"onnx cpu": 32, "onnx cuda": 16, "mlx metal": 16, "mlx cpu": 32, "executorch xnnpack": 32, "llamacpp cpu": 16}
WINDOW: dict[str, Any] = {"cache": KVEvictionPolicy.of(64, 4)}
HEAD: dict[str, Any] = {"drafter": object()}  # refused before it is looked at
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("onnx npu", "llama", {}, "onnx: no backend 'npu'; choose one of cpu, cuda"),
    ("onnx cpu", "llama", {"kv_bits": 4}, "onnx on cpu: kv_bits 4 .*; plan with --kv-bits 32 or 16 or 8"),
    ("onnx cpu", "llama", {"exits": (99,)}, r"exits \[99\] must lie between layer 1 and layer"),
    ("onnx cpu", "llama", {"recipe": NATIVE_RECIPES["mxfp4"]}, "a format that only other engines hold"),
    ("onnx cpu", "lfm2", {"exits": (1,)}, "exits with the layers of lfm2 are not supported"),
    ("onnx cpu", "gemma4", {"exits": (1,)}, "exits with the layers of gemma4_text are not supported"),
    ("onnx cuda", "llama", HEAD, "on the CPU alone; leave out --drafter"),
    ("onnx cuda", "qwen3_5", {}, "recurrent layers of .* on the CPU alone; plan for cpu"),
    ("onnx cuda", "gemma4", {}, "layers of gemma4_text are supported on the CPU alone; plan for cpu"),
    ("onnx cuda", "mixtral", {}, "experts of mixtral are supported on the CPU alone; plan for cpu"),
    ("mlx cpu", "lfm2", {"exits": (1,)}, "exits are not supported with the recurrent layers of"),
    ("mlx metal", "hunyuan", WINDOW, "not supported for hunyuan_v1_dense, whose scores depend on positions"),
    ("mlx cpu", "llama", {"kv_bits": 8}, "kv_bits 8 is not supported with heads that 32 does not divide"),
    ("executorch xnnpack", "llama", {"kv_bits": 4}, "on xnnpack: kv_bits 4 .*; plan with --kv-bits 32 or 8"),
    ("executorch vulkan", "llama", {"exits": (1,)}, "exits on vulkan .*or for xnnpack"),
    ("executorch vulkan", "llama", HEAD, "a drafting head on vulkan .*plan without --drafter, or for xnnpack"),
    ("executorch vulkan", "llama", WINDOW, "evictions, which are not supported; plan without --window"),
    ("executorch xnnpack", "llama", {"adapter_rank": 8}, "merge the adapter"),
    ("executorch xnnpack", "llama", {"recipe": S4_THROUGHOUT}, "has a 4-bit token embedding"),
    ("executorch xnnpack", "lfm2", {}, "recurrent layers of lfm2 .* and no convolution's inputs; choose onnx or mlx"),
    ("executorch xnnpack", "qwen3_5", {}, "recurrent layers of .* and no memory of a delta rule; choose onnx or mlx"),
    (
        "executorch xnnpack",
        "qwen3_moe",
        {},
        "experts of qwen3_moe .*no operator .* multiplies a token with the experts",
    ),
    ("llamacpp npu", "llama", {}, "choose one of cpu"),
    ("llamacpp cuda", "llama", {"gpu_layers": 99}, "99 layers on the GPU; at most"),
    ("llamacpp cpu", "llama", {"exits": (1,)}, "it runs all layers; use the onnx target"),
    ("llamacpp cpu", "llama", HEAD, "needs hidden states, which it does not give; use the onnx target"),
    ("llamacpp cpu", "llama", {"sequences": 257}, "257 sequences; it runs at most 256"),
    ("llamacpp cpu", "llama", {"kv_bits": 8}, "with heads that 64 does not divide"),
    ("llamacpp cpu", "mixtral", {}, "experts of mixtral are not supported"),
]


def plan_for(runs: str, family: str, **changes: Any) -> Plan:
    model = model_from_config(TINY[family], family, "config.json")
    target, backend = runs.split()
    storage = KVCacheConfig(capacity_tokens=512, kv_bits=changes.pop("kv_bits", RUNS.get(runs, 32)))
    return fake_plan(model).model_copy(update={"target": target, "backend": backend, "storage": storage, **changes})


@pytest.mark.parametrize(
    ("runs", "family", "changes", "reason"), REFUSED, ids=[f"{row[0]} {row[3]}" for row in REFUSED]
)
def test_a_plan_that_a_backend_cannot_run_is_refused(runs: str, family: str, changes: Any, reason: str) -> None:
    plan = plan_for(runs, family, **changes)
    with pytest.raises(Unsupported, match=reason) as refused:
        plugins.load_target(plan.target).check(plan)
    assert re.match(f"{plan.target}( on {plan.backend})?: ", str(refused.value)) and "\n" not in str(refused.value)


@pytest.mark.parametrize("runs", RUNS)
def test_a_plain_plan_is_taken(runs: str) -> None:
    plan = plan_for(runs, "llama")
    plugins.load_target(plan.target).check(plan)
