"""llama.cpp's mixtures: the format of each matrix of a model, by the rules of llama.cpp's quantiser.

In half of the layers, v_proj and down_proj get a finer format. The head gets one in every mixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from edgekit.contracts.recipe import GGUF_RECIPES, SMALL, SMALL_BITS, Format, NumberFormat, Recipe, Rule, weight_bytes
from edgekit.model.spec import ModelSpec

_HEAD: NumberFormat = "q6_k"
_FINER: NumberFormat = "q6_k"  # of values and down projections, in the layers of `_is_finer`
_FUSED: dict[str, NumberFormat] = {"q4_k": "q5_k", "q5_k": "q6_k"}  # common format → format of a fused qkv_proj
_FINER_OF_SMALL: tuple[tuple[str, NumberFormat], ...] = (("v_proj", "q5_k"), ("o_proj", "q4_k"), ("down_proj", "q4_k"))
_SENSITIVE = ("self_attn.v_proj", "mlp.down_proj")


def mixture_of(model: ModelSpec, recipe: Recipe) -> Recipe:
    """Return `SMALL`, or a mixture of `GGUF_RECIPES`, with the rules of this model's layers; others as they are."""
    if recipe == SMALL:
        return _small(model)
    if recipe != GGUF_RECIPES.get(recipe.name):
        return recipe
    return recipe.model_copy(update={"rules": (*_finer_rules(model, recipe.rules[-1].format.kind), *recipe.rules)})


def _finer_rules(model: ModelSpec, common: NumberFormat) -> Iterator[Rule]:
    yield Rule(pattern="*embed_tokens*" if model.tied else model.head, format=Format(kind=_HEAD))
    if common == _FINER:
        return
    if model.fused_qkv:
        yield Rule(pattern="*.qkv_proj", format=Format(kind=_FUSED[common]))
    for index in range(len(model.layers)):
        if _is_finer(index, len(model.layers)):
            for name in _SENSITIVE:
                yield Rule(pattern=f"*layers.{index}.{name}", format=Format(kind=_FINER))


@lru_cache(maxsize=4)  # a plan asks again for each backend
def _small(model: ModelSpec) -> Recipe:
    """Store all in q3_k, then give sensitive matrices finer formats while the model stays within `SMALL_BITS`."""
    common = Recipe(name=SMALL.name, rules=(Rule(pattern="*", format=Format(kind="q3_k")),))
    left = int(model.parameters * SMALL_BITS / 8) - weight_bytes(model, common)
    finer = []
    linears = [tensor for tensor in model.tensors() if tensor.role == "linear"]
    for suffix, kind in _FINER_OF_SMALL:
        for tensor in (each for each in linears if each.module.endswith(suffix)):
            stored = Format(kind=kind)
            more = stored.bytes(tensor.shape) - common.format_of(tensor).bytes(tensor.shape)
            if more <= left:
                finer.append(Rule(pattern=tensor.module, format=stored))
                left -= more
    return common.model_copy(update={"rules": (*finer, *common.rules)})


def _is_finer(index: int, layers: int) -> bool:
    """True in the first and the last eighth of the layers, and in every third between them."""
    eighth = layers // 8
    return index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2
