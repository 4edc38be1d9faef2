"""Plans that this target refuses, checked before anything is written."""

from __future__ import annotations

from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Plan
from edgekit.contracts.recurrent import is_recurrent
from edgekit.errors import InvalidInput, Unsupported
from edgekit.model.spec import ModelSpec

_FAMILIES = (
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3", "phi3", "gemma2", "gemma3_text", "granite", "olmo2",
    "olmo3", "exaone4", "ernie4_5", "gemma4_text", "hunyuan_v1_dense", "lfm2", "lfm2_moe", "qwen3_5_text", "mixtral",
    "qwen3_moe", "gpt_oss",
)  # fmt: skip


def can_evict(model: ModelSpec) -> bool:
    """Return False where scores depend on positions themselves: evictions leave later tokens where they are."""
    return not model.norms_after_rope


def refuse_plan(plan: Plan, weights: NeutralWeights) -> None:
    """Raise `Unsupported` if the plan cannot be exported, `InvalidInput` if it needs float weights and has none."""
    if plan.model.family not in _FAMILIES:
        raise Unsupported(f"mlx: no family {plan.model.family}; choose one of {', '.join(_FAMILIES)}")
    if plan.cache.window is not None and not can_evict(plan.model):
        raise Unsupported(
            f"mlx: a window of {plan.cache.window} tokens is not supported for {plan.model.family}, whose scores "
            "depend on positions; plan without --window, or for onnx"
        )
    if plan.exits and is_recurrent(plan.model):
        raise Unsupported(f"mlx: exits are not supported with the recurrent layers of {plan.model.family}")
    if plan.recipe.is_native() and not weights.recipe.is_exact():
        raise InvalidInput(
            f"mlx: {plan.recipe.name} is quantised from the float model, and these weights are {weights.recipe.name}"
        )
