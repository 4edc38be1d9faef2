"""Changes a plan after it was made, when its weights and its tokenizer are known: the estimate follows the facts."""

from __future__ import annotations

from edgekit.contracts.plan import Estimate, MemoryFacts, Plan
from edgekit.contracts.recipe import Recipe
from edgekit.planner.memory import predict

# The shares of the stored weights, which may depend on the recipe.
SHARES = ("mapped_share", "private_share", "disk_share")


def with_facts(plan: Plan, memory: MemoryFacts, recipe: Recipe | None = None) -> Plan:
    """Return the plan with these facts and this recipe. Every class of its estimate changes as they predict."""
    after = plan.model_copy(update={"memory": memory, "recipe": recipe or plan.recipe})
    before, now = _predicted(plan), _predicted(after)
    changed = {
        name: max(0, planned + getattr(now, name) - getattr(before, name))
        for name in Estimate.model_fields
        if (planned := getattr(plan.estimate, name)) is not None
    }
    return after.model_copy(update={"estimate": plan.estimate.model_copy(update=changed)})


def _predicted(plan: Plan) -> Estimate:
    return predict(
        plan.model,
        plan.recipe,
        plan.memory,
        held_tokens=plan.storage.capacity_tokens,
        sequences=plan.sequences,
        kv_bits=plan.storage.kv_bits,
        chunk_tokens=plan.chunk_tokens,
        draft_bytes=plan.estimate.draft_bytes,
        context=plan.context,
        exits=plan.exits,
        drafts=plan.draft is not None,
        gpu_layers=plan.gpu_layers,
    )
