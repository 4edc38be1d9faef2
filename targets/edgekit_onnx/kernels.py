"""The choice of kernels for products on arm64: by default those that round activations as finely as x86's kernels.

On cores with dot product instructions, onnxruntime would use Arm's KleidiAI for 4-bit weights. KleidiAI rounds
activations more coarsely, which made KL seven times as large (docs/onnx.md), and its results depend on chunks
in ways that a short check misses.
"""

from __future__ import annotations

import platform
from collections.abc import Collection

from edgekit.common.environment import environment_choice
from edgekit.contracts.recipe import Recipe

MLAS, KLEIDIAI = "mlas", "kleidiai"
DISABLES_KLEIDIAI = "mlas.disable_kleidiai"  # key of a session option; no effect on x86
TAKEN = "products of 4-bit weights run on KleidiAI's kernels, which round activations coarsely (EDGEKIT_KLEIDIAI=on)"
NOT_EXACT = "exact mode does not hold with KleidiAI's kernels; unset EDGEKIT_KLEIDIAI"
_PLANNED = (
    "products run without KleidiAI's kernels, which are for speed alone: EDGEKIT_KLEIDIAI=on takes them (docs/onnx.md)"
)


def arm_kernels() -> str:
    """Return `MLAS` or `KLEIDIAI` on arm64, an empty string on other machines."""
    setting = environment_choice("EDGEKIT_KLEIDIAI", "on", "off")
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return ""
    return KLEIDIAI if setting == "on" else MLAS


def planned_kernels(simd: Collection[str], recipe: Recipe) -> tuple[str, ...]:
    """Return the note of a plan for a processor with these extensions; none where KleidiAI does not apply."""
    has_4_bits = any(rule.format.kind == "s4" for rule in recipe.rules)
    return (_PLANNED,) if "dotprod" in simd and has_4_bits else ()
