"""Models and recipes that vLLM and SGLang can load: embedding and head in float, and one format per stacked tensor.

Both servers stack q, k and v into one tensor, gate and up into another, all experts of a layer into two more, and fail
while loading if the parts have different formats.
"""

from __future__ import annotations

from edgekit import ModelSpec, Tensor
from edgekit.contracts.recipe import Recipe, Rule
from edgekit.contracts.recurrent import is_recurrent
from edgekit.errors import Unsupported


def handover(recipe: Recipe) -> Recipe:
    """Return the recipe with embedding and head in float, because servers cannot load them quantised."""
    floats = tuple(Rule(pattern=pattern, format=recipe.float_format) for pattern in ("*embed_tokens*", "*lm_head"))
    return recipe.model_copy(update={"name": f"{recipe.name}-handover", "rules": floats + recipe.rules})


def refuse_model(model: ModelSpec, where: str) -> None:
    """Refuse a model whose hand-over could be neither planned nor checked."""
    if model.encoder:
        raise Unsupported(
            f"{where}: is an encoder, which generates no tokens: a server's plan and smoke test are about those;"
            " `edgekit serve` offers its embeddings"
        )
    if is_recurrent(model):
        raise Unsupported(
            f"{where}: has recurrent layers (LFM2, Qwen3.5), whose states no layout here divides over GPUs and which"
            " no server was seen to load in this form; `edgekit serve` offers it on one machine"
        )
    if model.experts and model.experts.linear_bias:
        raise Unsupported(
            f"{where}: servers read gpt-oss's experts as stacks, which no recipe writes; give them the published files"
        )


def refuse_split(model: ModelSpec, recipe: Recipe) -> None:
    """Refuse a recipe that stores parts of one stacked tensor, or experts of one layer, in several formats."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in (each for each in model.tensors() if each.is_linear):
        together = tensor.module.rpartition(".experts.")[0] if tensor.role == "expert" else tensor.stack
        groups.setdefault(together, []).append(tensor)
    for group in groups.values():
        first_of = {str(recipe.format_of(tensor)): tensor for tensor in reversed(group)}
        if len(first_of) > 1:
            parts = ", ".join(f"{tensor.module} {stored}" for stored, tensor in reversed(first_of.items()))
            raise Unsupported(
                f"recipe {recipe.name}: servers hold {parts} as one tensor of one format; give all of them the same"
            )
