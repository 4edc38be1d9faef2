"""Changes a plan after it was made, when its weights and its tokenizer are known: the estimate follows the facts."""

from __future__ import annotations

from edgekit.contracts.plan import Estimate, MemoryFacts, Plan
from edgekit.contracts.recipe import Recipe
from edgekit.planner.memory import load_of, predict

# The shares of the stored weights, which may depend on the recipe.
SHARES = ("mapped_share", "private_share", "disk_share")


def with_facts(plan: Plan, memory: MemoryFacts, recipe: Recipe | None = None) -> Plan:
    """Return the plan with these facts and this recipe. Every class of its estimate changes as they predict."""
    after = plan.model_copy(update={"memory": memory, "recipe": recipe or plan.recipe})
    before, now = (predict(load_of(each)) for each in (plan, after))
    changed = {
        name: max(0, planned + getattr(now, name) - getattr(before, name))
        for name in Estimate.model_fields
        if (planned := getattr(plan.estimate, name)) is not None
    }
    return after.model_copy(update={"estimate": plan.estimate.model_copy(update=changed)})
