"""What this target can do with a model, and the models that it refuses."""

from __future__ import annotations

from edgekit.contracts.capabilities import Capabilities, Feature
from edgekit.contracts.recurrent import checkpoint_tokens, is_recurrent
from edgekit.enginekit.keeping import CACHE, scorers_for
from edgekit.model.spec import ModelSpec


def capabilities(model: ModelSpec, *, on_metal: bool) -> Capabilities:
    """Return what the GPU or the CPU can do with the model."""
    # Evictions leave later tokens where they are, so scores must not depend on positions themselves.
    can_evict = not model.norms_after_rope
    features: set[Feature] = {"recurrent layers", "experts", "per-layer embeddings", "minima", "adapters"}
    features.add("drafting heads")
    features |= {"evictions"} if can_evict else set()
    features |= set() if is_recurrent(model) else {"exits"}
    # 8 and 4 bits need a group that divides every head.
    can_quantise = all(layer.head_dim % 32 == 0 for layer in model.layers)
    return Capabilities(
        vocabulary=model.vocab_size,
        kv_bits=(*((16,) if on_metal else (32, 16)), *((8, 4) if can_quantise else ())),
        narrowest="" if can_quantise else " with heads that 32 does not divide",
        features=frozenset(features),
        why_not={
            "encoders": f"{model.family} is an encoder; plan for onnx on the CPU",
            "evictions": f"a window of tokens is not supported for {model.family}, whose scores depend on positions; "
            "plan without --window, or for onnx",
            "exits": f"exits are not supported with the recurrent layers of {model.family}; plan without --exit",
        },
        scorers=scorers_for(CACHE) if can_evict else (),
        kv_layers=model.storing_layers,
        checkpoint_tokens=checkpoint_tokens(model),
        exact="on_request" if on_metal else "always",
    )
