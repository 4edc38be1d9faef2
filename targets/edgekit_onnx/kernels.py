"""Which kernels compute products on arm64: by default those that round activations as finely as x86's kernels do.

Where a core has dot products, onnxruntime would take Arm's KleidiAI for 4-bit weights. It rounds activations more
coarsely, which cost seven times the KL (docs/evidence/onnx.md), and its results depend on how tokens were chunked in
ways that a short check misses.
"""

from __future__ import annotations

import platform
from collections.abc import Collection

from edgekit.common.environment import environment_choice
from edgekit.contracts.recipe import Recipe

MLAS, KLEIDIAI = "mlas", "kleidiai"
DISABLES_KLEIDIAI = "mlas.disable_kleidiai"  # an entry of session options; without effect on x86
TAKEN = "products of 4-bit weights run on KleidiAI's kernels, which round activations coarsely (EDGEKIT_KLEIDIAI=on)"
NOT_EXACT = "exact mode does not hold with KleidiAI's kernels; unset EDGEKIT_KLEIDIAI"
_PLANNED = (
    "products run without KleidiAI's kernels, which are for speed alone: EDGEKIT_KLEIDIAI=on takes them (docs/onnx.md)"
)


def arm_kernels() -> str:
    """`MLAS` or `KLEIDIAI` on arm64, an empty string on other machines."""
    setting = environment_choice("EDGEKIT_KLEIDIAI", "on", "off")
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return ""
    return KLEIDIAI if setting == "on" else MLAS


def planned_kernels(simd: Collection[str], recipe: Recipe) -> tuple[str, ...]:
    """The note of a plan for a processor with these extensions; none where KleidiAI would not be taken anyway."""
    has_4_bits = any(rule.format.kind == "s4" for rule in recipe.rules)
    return (_PLANNED,) if "dotprod" in simd and has_4_bits else ()
