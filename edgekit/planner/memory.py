"""Adds up the terms of memory that a target gives, and what the runtime allocates for every target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from edgekit.common.units import show_bytes
from edgekit.contracts.memory import MemoryLoad, MemoryTerms, Term, sized, total
from edgekit.contracts.plan import CLASSES, Estimate, MemoryFacts, Plan
from edgekit.contracts.recipe import Recipe
from edgekit.planner.gpu_layers import divided
from edgekit.planner.head_memory import head_terms, head_why

_HEAD_COPIES, _FLOAT = 4, 4  # float copies of a head's keys or values: 3.03 were measured, of 16 bits


def load_of(plan: Plan) -> MemoryLoad:
    """Return what a plan has in memory."""
    return MemoryLoad(
        plan.model,
        plan.recipe,
        plan.backend,
        plan.memory,
        held_tokens=plan.storage.capacity_tokens,
        sequences=plan.sequences,
        kv_bits=plan.storage.kv_bits,
        chunk_tokens=plan.chunk_tokens,
        built_tokens=plan.storage.capacity_tokens,
        draft_bytes=plan.estimate.draft_bytes,
        prefix_bytes=plan.estimate.prefix_bytes,
        adapter_rank=plan.adapter_rank,
        context=plan.context,
        exits=plan.exits,
        drafts=plan.draft is not None or plan.drafter is not None,
        head=plan.drafter,
        policy=plan.cache,
        gpu_layers=plan.gpu_layers,
    )


def predict(load: MemoryLoad, memory: MemoryTerms) -> Estimate:
    """Predict the memory of a load: the sum of its terms, divided between the processor and a GPU."""
    sums = Counter[str](dict.fromkeys(CLASSES, 0))
    for term in terms(load, memory):
        sums[term.kind] += term.bytes
    return divided(Estimate(**sums), load, load.gpu_layers)


def explain(plan: Plan, memory: MemoryTerms) -> list[str]:
    """Return the arithmetic of a plan's estimate, one line per class."""
    load, whys = load_of(plan), dict[str, str]()
    for kind, size, why in terms(load, memory):
        if kind not in whys:
            whys[kind] = why
        elif size:
            whys[kind] += f" + {why}"
    exact = total(terms(load._replace(exact=True), memory)) - total(terms(load, memory))
    if exact:
        whys["activation_bytes"] += f"; exact mode takes {show_bytes(exact)} more"
    sizes = [(kind, name, getattr(plan.estimate, kind)) for kind, name in (*CLASSES.items(), ("disk_bytes", "on disk"))]
    return [f"{name:<15} {show_bytes(size):>9} = {whys.get(kind, 'nothing')}" for kind, name, size in sizes]


def terms(load: MemoryLoad, memory: MemoryTerms) -> list[Term]:
    """Return every term, before layers on a GPU are divided off."""
    draft = "draft model, its cache and activations" if load.draft_bytes else "no draft model"
    draft = draft if load.head is None else head_why(load.head)
    return [
        Term("draft_bytes", load.draft_bytes, draft),
        Term("prefix_bytes", load.prefix_bytes, "prefix cache" if load.prefix_bytes else "no prefix cache"),
        *memory(load),
        *_scoring(load),
        *(head_terms(load.head, load.held_tokens) if load.head is not None else ()),
    ]


def _scoring(load: MemoryLoad) -> Iterator[Term]:
    """Yield what scores the tokens of a full window by its cache. Scores by attention are of the target's graphs."""
    policy = load.policy
    if policy is None or policy.window is None or not policy.is_scored:
        return
    from edgekit.enginekit.keeping import ByAttention, scorers  # loads numpy, which only windows by scores need

    if not isinstance(scorers().get(policy.keep), ByAttention):
        size = _HEAD_COPIES * _FLOAT * policy.window * max(layer.head_dim for layer in load.model.layers)
        yield sized("activation_bytes", size, "to score tokens")


def without_tokenizer(facts: MemoryFacts) -> MemoryFacts:
    """Return the facts of a draft model, which keeps no tokenizer in memory."""
    return facts.model_copy(update={"tokenizer_bytes": 0, "tokenizer_reading_bytes": 0})


def with_facts(plan: Plan, memory: MemoryTerms, facts: MemoryFacts, recipe: Recipe | None = None) -> Plan:
    """Return the plan with these facts and this recipe. Every class of its estimate changes as they predict."""
    after = plan.model_copy(update={"memory": facts, "recipe": recipe or plan.recipe})
    before, now = (predict(load_of(each), memory) for each in (plan, after))
    update = {
        name: max(0, planned + getattr(now, name) - getattr(before, name))
        for name in Estimate.model_fields
        if (planned := getattr(plan.estimate, name)) is not None
    }
    return after.model_copy(update={"estimate": plan.estimate.model_copy(update=update)})
