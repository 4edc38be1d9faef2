"""What this target can do with a model, and the models that it refuses."""

from __future__ import annotations

from edgekit.contracts.capabilities import Capabilities, Feature
from edgekit.contracts.recurrent import checkpoint_tokens, is_recurrent
from edgekit.enginekit.keeping import CACHE, scorers_for
from edgekit.model.spec import ModelSpec

_FAMILIES = (
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3", "phi3", "gemma2", "gemma3_text", "granite", "olmo2",
    "olmo3", "exaone4", "ernie4_5", "gemma4_text", "hunyuan_v1_dense", "lfm2", "lfm2_moe", "qwen3_5_text", "mixtral",
    "qwen3_moe", "gpt_oss",
)  # fmt: skip


def capabilities(model: ModelSpec, *, on_metal: bool) -> Capabilities:
    """Return what the GPU or the CPU can do with the model."""
    # Evictions leave later tokens where they are, so scores must not depend on positions themselves.
    can_evict = not model.norms_after_rope
    features: set[Feature] = {"recurrent layers", "experts", "per-layer embeddings", "drafting heads", "adapters"}
    features |= {"evictions"} if can_evict else set()
    features |= set() if is_recurrent(model) else {"exits"}
    # 8 and 4 bits need a group that divides every head.
    can_quantise = all(layer.head_dim % 32 == 0 for layer in model.layers)
    return Capabilities(
        vocabulary=model.vocab_size,
        kv_bits=(*((16,) if on_metal else (32, 16)), *((8, 4) if can_quantise else ())),
        narrowest="" if can_quantise else " with heads that 32 does not divide",
        refusal=None
        if model.family in _FAMILIES
        else f"no family {model.family}; choose one of {', '.join(_FAMILIES)}",
        features=frozenset(features),
        why_not={
            "evictions": f"a window of tokens is not supported for {model.family}, whose scores depend on positions; "
            "plan without --window, or for onnx",
            "exits": f"exits are not supported with the recurrent layers of {model.family}; plan without --exit",
        },
        scorers=scorers_for(CACHE) if can_evict else (),
        kv_layers=model.storing_layers,
        checkpoint_tokens=checkpoint_tokens(model),
        exact="on_request" if on_metal else "always",
    )
