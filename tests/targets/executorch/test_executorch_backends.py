"""Backends that are only lowered: programs are whole and described, and opening them is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("executorch")
pytest.importorskip("transformers")

from edgekit_executorch import ExecutorchTarget
from edgekit_executorch.export import lower
from edgekit_executorch.inspection import read_contents
from edgekit_executorch.layout import PROGRAM, description
from edgekit_executorch.quiet import quiet_output
from executorch_models import plan_for, quiet, weights_of

from edgekit.errors import Unsupported

pytestmark = [pytest.mark.executorch, pytest.mark.quantize, pytest.mark.slow]


def test_coreml_takes_both_methods_whole(tmp_path: Path) -> None:
    pytest.importorskip("coremltools", exc_type=ImportError)
    sizes = {}
    for recipe in ("float16", "s4-g32"):
        weights = weights_of(tmp_path / recipe, "llama", recipe, layers=1)
        plan = plan_for(weights, backend="coreml", kv_bits=16)
        path = tmp_path / recipe / PROGRAM
        with quiet_output():
            lower(plan, weights, path, quiet)
        contents = read_contents(path)
        assert contents.delegates == {"CoreMLBackend"} and contents.operators == frozenset()
        assert set(contents.methods) == {"append", "step", *description(plan)}
        sizes[recipe] = contents.bytes
        with pytest.raises(Unsupported, match=r"lowered to coreml, which this build of ExecuTorch cannot run"):
            ExecutorchTarget().open(plan, path.parent)
    linears = 3 * 64 * 128 + 64 * (64 + 2 * 32 + 64)
    assert sizes["float16"] - sizes["s4-g32"] > linears  # 16 bits became 4 and scales, a row of 12 bits and less


def test_vulkan_takes_all_but_one_lookup(tmp_path: Path) -> None:
    weights = weights_of(tmp_path, "llama", "float32", layers=1)
    plan = plan_for(weights, backend="vulkan")
    with quiet_output():
        lower(plan, weights, tmp_path / PROGRAM, quiet)
    contents = read_contents(tmp_path / PROGRAM)
    assert contents.delegates == {"VulkanBackend"}
    assert len(contents.operators) <= 2, contents.operators
    with pytest.raises(Unsupported, match="lowered to vulkan"):
        ExecutorchTarget().open(plan, tmp_path)
