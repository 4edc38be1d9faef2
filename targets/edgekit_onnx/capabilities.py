"""What this target can do with a model, and the models and recipes that it refuses."""

from __future__ import annotations

from functools import lru_cache

from edgekit.contracts.capabilities import Capabilities, Feature
from edgekit.contracts.recipe import Recipe
from edgekit.contracts.recurrent import checkpoint_tokens, is_recurrent
from edgekit.enginekit.keeping import ATTENTION, CACHE, scorers_for
from edgekit.model.spec import ModelSpec

MOST_TAPS = 8  # taps of a convolution, each of which takes three nodes
MOST_KEY_DIM = 1024  # key size of a delta rule, which writes that many numbers into the graph
_LEAST_BLOCK = 16  # values of an expert's row that share a scale


@lru_cache(maxsize=256)
def capabilities(model: ModelSpec, recipe: Recipe, backend: str) -> Capabilities:
    """Return what a backend can do with the model in this recipe."""
    if model.encoder:
        return _of_encoder(model, recipe, backend)
    on_cpu = backend == "cpu"
    features: set[Feature] = {"evictions", "adapters"}
    features |= (
        {"encoders", "recurrent layers", "experts", "per-layer embeddings", "drafting heads"} if on_cpu else set()
    )
    if not is_recurrent(model) and not model.layer_scalars:
        features.add("exits")
    if not model.experts:
        features.add("minima")
    on_the_cpu = "supported on the CPU alone; plan for cpu"
    return Capabilities(
        vocabulary=model.vocab_size,
        kv_bits=(32, 16, 8) if on_cpu else (16,),
        refusal=_refusal(model, recipe),
        features=frozenset(features),
        why_not={
            "encoders": f"{model.name} is an encoder, which runs on the CPU here; plan for cpu",
            "recurrent layers": f"the recurrent layers of {model.family} are {on_the_cpu}",
            "experts": f"the experts of {model.family} are {on_the_cpu}",
            "per-layer embeddings": f"the layers of {model.family} are {on_the_cpu}",
            "exits": f"exits with the layers of {model.family} are not supported; plan without --exit",
            "drafting heads": "hidden states for a drafting head are given on the CPU alone; leave out --drafter",
        },
        can_save_evicted=not is_recurrent(model),
        # Attention's weights can be read on the CPU, from states that can go back a few tokens.
        scorers=scorers_for(CACHE, ATTENTION) if backend == "cpu" and not is_recurrent(model) else scorers_for(CACHE),
        kv_layers=model.storing_layers if on_cpu else (),
        checkpoint_tokens=checkpoint_tokens(model),
        hidden_size=model.hidden_size if on_cpu else None,
        exact="on_request",
    )


def _of_encoder(model: ModelSpec, recipe: Recipe, backend: str) -> Capabilities:
    return Capabilities(
        vocabulary=model.vocab_size,
        kv_bits=(32,),
        refusal=_refusal(model, recipe),
        features=frozenset({"encoders"} if backend == "cpu" else ()),
        why_not={
            "encoders": f"{model.name} is an encoder, which runs on the CPU here; plan for cpu",
            "exits": "an encoder has no exits; plan without --exit",
            "adapters": "an encoder takes no adapters; plan without --adapter-rank",
        },
        max_rewind=0,
        can_save=False,
        hidden_size=model.vector_size,
        generates=False,
        classifies=bool(model.encoder and model.encoder.classifier),
        exact="never",
    )


def _refusal(model: ModelSpec, recipe: Recipe) -> str | None:
    """Return the reason why the model cannot be exported in this recipe; None if it can."""
    if recipe.is_rare():
        return f"recipe {recipe.name} has a format that only other engines hold; choose an s4, s8 or float recipe"
    odd = [layer.head_dim for layer in model.layers if layer.head_dim % 8 and not (layer.is_recurrent or model.encoder)]
    if odd:
        return f"heads of {odd[0]} values are not supported, only multiples of 8; plan for another target"
    rules = [layer.delta_rule for layer in model.layers if layer.delta_rule]
    if max([*(layer.conv_taps or 0 for layer in model.layers), *(rule.taps for rule in rules)]) > MOST_TAPS:
        return f"convolutions over more than {MOST_TAPS} tokens are not supported; plan for another target"
    if any(rule.key_dim > MOST_KEY_DIM for rule in rules):
        return f"linear attention with keys of more than {MOST_KEY_DIM} values is not supported"
    return _refuse_experts(model, recipe)


def _refuse_experts(model: ModelSpec, recipe: Recipe) -> str | None:
    if model.experts is None:
        return None
    if model.activation != "silu":
        return f"experts with the activation {model.activation} are not supported; plan for another target"
    formats = {recipe.format_of(tensor) for tensor in model.tensors() if tensor.role == "expert"}
    kinds = sorted({"float" if each.is_float else each.kind for each in formats})
    if len(kinds) > 1:
        return f"experts in {' and '.join(kinds)} at once are not supported; give all of them one format"
    if kinds == ["float"] and model.experts.scoring != "softmax":
        return f"the experts of {model.family} in floats are not supported; choose an s4 or s8 recipe"
    sizes = (model.hidden_size, model.experts.intermediate_size)
    if kinds != ["float"] and any(size % _LEAST_BLOCK for size in sizes):
        return f"integers of experts need sizes that are multiples of {_LEAST_BLOCK}, not {sizes}; choose float32"
    return None
