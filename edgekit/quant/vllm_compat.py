"""Models and recipes that vLLM and SGLang can load: embedding and head in float, and one format per stacked tensor.

Both servers stack q, k and v into one tensor, gate and up into another, all experts of a layer into two more, and fail
while loading if the parts have different formats.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgekit.contracts.recipe import Recipe, Rule
from edgekit.contracts.recurrent import is_recurrent
from edgekit.errors import Unsupported
from edgekit.model.spec import ModelSpec
from edgekit.model.tensors import Tensor

_STACKED_ON = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def handover(recipe: Recipe) -> Recipe:
    """Return the recipe with embedding and head in float, because servers cannot load them quantised."""
    floats = tuple(Rule(pattern=pattern, format=recipe.float_format) for pattern in ("*embed_tokens*", "*lm_head"))
    return recipe.model_copy(update={"name": f"{recipe.name}-handover", "rules": floats + recipe.rules})


def is_for_servers(recipe: Recipe, model: ModelSpec) -> bool:
    """Return True if embedding and head stay in float."""
    return all(recipe.format_of(tensor).is_float for tensor in model.tensors() if tensor.role in ("embedding", "head"))


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


def held_as_one(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group the linears among `tensors` by the tensor that a server stacks them into."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_linear:
            parent, _, name = tensor.module.rpartition(".")
            groups.setdefault(f"{parent}.{_STACKED_ON.get(name, name)}", []).append(tensor)
    return list(groups.values())


def refuse_split(model: ModelSpec, recipe: Recipe) -> None:
    """Refuse a recipe that stores parts of one stacked tensor, or experts of one layer, in several formats."""
    experts: dict[str, list[Tensor]] = {}
    for tensor in model.tensors():
        if tensor.role == "expert":
            experts.setdefault(tensor.module.rpartition(".experts.")[0], []).append(tensor)
    for group in [*held_as_one(model.tensors()), *experts.values()]:
        first_of = {str(recipe.format_of(tensor)): tensor for tensor in reversed(group)}
        if len(first_of) > 1:
            parts = ", ".join(f"{tensor.module} {stored}" for stored, tensor in reversed(first_of.items()))
            raise Unsupported(
                f"--handover: servers hold {parts} as one tensor of one format; give all of them the same in the recipe"
            )
