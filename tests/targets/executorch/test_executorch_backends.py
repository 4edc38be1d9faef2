"""Backends that are only lowered: programs are whole and described, and opening them is refused with the reason."""

from __future__ import annotations

import pytest

pytest.importorskip("executorch")
pytest.importorskip("transformers")

from edgekit_executorch.inspection import read_contents
from edgekit_executorch.layout import PROGRAM, description
from engines import program

from edgekit.errors import Unsupported

pytestmark = [pytest.mark.executorch, pytest.mark.quantize, pytest.mark.slow]


def test_coreml_takes_both_methods_whole() -> None:
    pytest.importorskip("coremltools", exc_type=ImportError)
    sizes = {}
    for recipe in ("float16", "s4-g32"):
        made = program("llama", recipe, layers=1, backend="coreml", kv_bits=16)
        contents = read_contents(made.files / PROGRAM)
        assert contents.delegates == {"CoreMLBackend"} and contents.operators == frozenset()
        assert set(contents.methods) == {"append", "step", *description(made.plan)}
        sizes[recipe] = contents.bytes
        with pytest.raises(Unsupported, match=r"lowered to coreml, which this build of ExecuTorch cannot run"):
            made.open()
    linears = 3 * 64 * 128 + 64 * (64 + 2 * 32 + 64)
    assert sizes["float16"] - sizes["s4-g32"] > linears  # 16 bits became 4 and scales, a row of 12 bits and less


def test_vulkan_takes_all_but_one_lookup() -> None:
    made = program("llama", "float32", layers=1, backend="vulkan")
    contents = read_contents(made.files / PROGRAM)
    assert contents.delegates == {"VulkanBackend"}
    assert len(contents.operators) <= 2, contents.operators
    with pytest.raises(Unsupported, match="lowered to vulkan"):
        made.open()
