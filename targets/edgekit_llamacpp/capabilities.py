"""What this target can do with a model."""

from __future__ import annotations

from functools import lru_cache

from edgekit.contracts.capabilities import Capabilities, Feature
from edgekit.contracts.recipe import AS_IS, Recipe
from edgekit.model.rope import frequencies
from edgekit.model.spec import ModelSpec
from edgekit.quant.neutral_gguf import refusal

MAX_SEQUENCES = 256  # beyond this, llama.cpp aborts the process
QUANTISED_KV_HEADS = 64
GGML_TYPES = {32: 0, 16: 1, 8: 8, 4: 2}  # of a cache by its bits: F32, F16, Q8_0, Q4_0
_RUNS_WINDOWS = ("gemma2", "gemma3_text")  # it keeps their windowed layers apart, and ignores windows of others


@lru_cache(maxsize=256)
def capabilities(model: ModelSpec, recipe: Recipe, backend: str, context: int) -> Capabilities:
    """Return what a backend can do with the model in this recipe, in texts of up to `context` tokens."""
    no_evictions = _no_evictions(model, context)
    # An 8- or 4-bit cache rotates its values in blocks.
    can_quantise = all(layer.head_dim % QUANTISED_KV_HEADS == 0 for layer in model.layers)
    features: set[Feature] = {"adapters", "minima"}
    if not no_evictions:
        features.add("evictions")
    return Capabilities(
        vocabulary=model.vocab_size,
        # The usual width comes first.
        kv_bits=(16, 32, 8, 4) if can_quantise else (16, 32),
        narrowest="" if can_quantise else f" with heads that {QUANTISED_KV_HEADS} does not divide",
        # The file of another tool is what llama.cpp makes of it.
        refusal=None if recipe.name == AS_IS else refusal(model, recipe, context),
        features=frozenset(features),
        why_not={
            "evictions": f"a window needs evictions, and {no_evictions}; plan without --window",
            "exits": "early exits: it runs all layers; use the onnx target",
            "drafting heads": "a drafting head needs hidden states, which it does not give; use the onnx target",
        },
        max_states=MAX_SEQUENCES,
        reserves_kv=True,
        # Windowed layers leave out tokens outside their window.
        can_save=all(layer.window is None for layer in model.layers),
        gpu_layers=len(model.layers) + 1 if backend != "cpu" else 0,
        exact="on_request",
    )


def _no_evictions(model: ModelSpec, context: int) -> str | None:
    """Return the reason why tokens cannot be evicted; None if they can."""
    if any(frequencies(rope, context)[1] != 1.0 for rope in model.ropes.values()):
        return "llama.cpp scales the keys of this model's rope once more at each of them"
    if model.family in _RUNS_WINDOWS and all(layer.window is not None for layer in model.layers):
        return "llama.cpp ends the process at the first one if all layers have windows of their own"
    return None
