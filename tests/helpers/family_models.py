"""Tiny random models of every family, as folders, neutral weights, plans and the reference's answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgekit.common.content_store import ContentStore
from edgekit.contracts.engine import Chunk, Engine, State
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Estimate, MemoryFacts, Plan, Quality, Speed
from edgekit.contracts.recipe import Recipe, named_recipe
from edgekit.model.families import model_from_config
from edgekit.model.head_spec import HeadSpec
from edgekit.model.spec import ModelSpec
from edgekit.quant.pipeline import neutral_weights

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.5 + 0.3 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
OLMO3_ROPES = {"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
MINISTRAL3_ROPE = {**YARN_ROPE, "original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1}
HUNYUAN_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}
LFM2 = {
    **SMALL,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
}
QWEN3_5 = {
    **SMALL,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "tie_word_embeddings": True,
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA4_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA4 = {
    **SMALL,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "rope_parameters": GEMMA4_ROPES,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 64,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "tie_word_embeddings": True,
}

# name → (transformers' model type, its config)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SMALL, "tie_word_embeddings": True}),
    "llama untied, with biases": (
        "llama",
        {**SMALL, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "llama 3 rope, wide heads": ("llama", {**SMALL, "head_dim": 32, "rope_parameters": LLAMA3_ROPE}),
    "llama with yarn": ("llama", {**SMALL, "rope_parameters": YARN_ROPE}),
    "mistral with a window": ("mistral", {**SMALL, "sliding_window": 12}),
    "qwen2": ("qwen2", {**SMALL, "tie_word_embeddings": True}),
    "qwen2 with windows": (
        "qwen2",
        {**SMALL, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**SMALL, "head_dim": 32}),
    "smollm3": ("smollm3", {**SMALL, "no_rope_layers": [1, 0, 1], "num_key_value_heads": 2}),
    "phi3": ("phi3", {**SMALL, "sliding_window": None}),
    "phi3 with longrope": (
        "phi3",
        {
            **SMALL,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 64,
            "rope_parameters": {**LONG_ROPE, "partial_rotary_factor": 0.5},
            "sliding_window": None,
        },
    ),
    "gemma2": (
        "gemma2",
        {
            **SMALL,
            "head_dim": 32,
            "sliding_window": 12,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "layer_types": KINDS,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **SMALL,
            "head_dim": 32,
            "sliding_window": 12,
            "query_pre_attn_scalar": 20,
            "layer_types": KINDS,
            "rope_parameters": GEMMA3_ROPES,
        },
    ),
    "granite": (
        "granite",
        {
            **SMALL,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("olmo2", SMALL),
    "olmo3": ("olmo3", {**SMALL, "sliding_window": 12, "layer_types": KINDS, "rope_parameters": OLMO3_ROPES}),
    "exaone4": ("exaone4", {**SMALL, "sliding_window": 12, "layer_types": KINDS}),
    "hunyuan": (
        "hunyuan_v1_dense",
        {**SMALL, "head_dim": 32, "rope_parameters": HUNYUAN_ROPE, "tie_word_embeddings": True},
    ),
    "ernie4_5": ("ernie4_5", {**SMALL, "head_dim": 32, "use_bias": True}),
    "ministral3": (
        "ministral3",
        {**SMALL, "head_dim": 32, "max_position_embeddings": 512, "rope_parameters": MINISTRAL3_ROPE},
    ),
    "glm": ("glm", {**SMALL, "head_dim": 32}),
    "glm4": ("glm4", {**SMALL, "head_dim": 32, "partial_rotary_factor": 0.75}),
    "arcee": ("arcee", {**SMALL, "mlp_bias": True}),
    "cohere2": ("cohere2", {**SMALL, "num_hidden_layers": 4, "sliding_window": 12, "logit_scale": 0.7}),
}
# Families that differ from Llama in small ways.
TWISTED = (
    "ministral3",
    "granite",
    "hunyuan",
    "exaone4",
    "olmo2",
    "olmo3",
    "ernie4_5",
    "glm",
    "glm4",
    "arcee",
    "cohere2",
)
# Families with a recurrent part, which not every target runs.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", LFM2),
    "lfm2, five taps, with biases": (
        "lfm2",
        {
            **LFM2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "conv_L_cache": 5,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 64,
        },
    ),
    "qwen3_5": ("qwen3_5_text", QWEN3_5),
    "qwen3_5, more heads of values, with biases": (
        "qwen3_5_text",
        {
            **QWEN3_5,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
}
# Families whose layers share keys and values and have inputs of their own, which not every target runs.
SHARING: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4, keys as values, no inputs of layers": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": False,
        },
    ),
}
QWEN3_MOE = {
    **SMALL,
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
GPT_OSS = {
    **SMALL,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "sliding_window": 12,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rope_parameters": YARN_ROPE,
}
# Mixtures of experts, which not every target runs.
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe, shares of all experts, a dense layer": (
        "qwen3_moe",
        {**QWEN3_MOE, "norm_topk_prob": False, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss, all experts, tied": (
        "gpt_oss",
        {
            **GPT_OSS,
            "num_experts_per_tok": 6,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 2.0,
            "rope_parameters": {**YARN_ROPE, "truncate": False},
        },
    ),
}
# Mixtures in layers that keep a recurrent part; no target runs them in floats.
HYBRID_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2_moe": (
        "lfm2_moe",
        {
            **LFM2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
            "tie_word_embeddings": True,
        },
    )
}
EVERY = FAMILIES | RECURRENT | SHARING | EXPERTS | HYBRID_EXPERTS
ONE_LAYER, WIDE_HEADS = "one layer", "wide heads"
_ONE_WIDE_LAYER = {**SMALL, "head_dim": 64, "num_hidden_layers": 1, "num_key_value_heads": 2}
_GEMMA = {**SMALL, "head_dim": 32, "num_hidden_layers": 6, "sliding_window": 12, "query_pre_attn_scalar": 32}
OF_TARGETS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "onnx": EVERY,
    "mlx": EVERY | {ONE_LAYER: ("llama", _ONE_WIDE_LAYER)},
    "executorch": FAMILIES,
    "llamacpp": {  # within what llama.cpp computes
        "llama": FAMILIES["llama"],
        "llama untied, with biases": FAMILIES["llama untied, with biases"],
        "llama 3 rope, wide heads": FAMILIES["llama 3 rope, wide heads"],
        "llama with yarn": FAMILIES["llama with yarn"],
        "mistral": ("mistral", {**SMALL, "sliding_window": None}),
        "qwen2": FAMILIES["qwen2"],
        "qwen3": FAMILIES["qwen3"],
        "smollm3": ("smollm3", {**SMALL, "num_hidden_layers": 5}),
        "phi3": FAMILIES["phi3"],
        "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
        "gemma3": ("gemma3_text", {**_GEMMA, "rope_parameters": GEMMA3_ROPES}),
        ONE_LAYER: ("llama", {**SMALL, "num_hidden_layers": 1}),
        WIDE_HEADS: ("llama", {**SMALL, "head_dim": 64, "num_key_value_heads": 2}),
    },
}


def write_model(folder: Path, kind: str, config: dict[str, Any], seed: int = 0) -> None:
    """A folder as `save_pretrained` writes it, with norms and biases that are not trivial."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).to(torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or name.endswith((".bias", "proj_bias")):
                value.add_(torch.randn_like(value) * 0.1)
            if name.endswith("gate_up_proj") and kind == "gpt_oss" and "swiglu_limit" not in config:
                value.mul_(4.0)  # beyond the usual limit
            if name.endswith("sinks"):
                value.copy_(torch.randn_like(value))
            if "q_norm" in name and kind == "gemma4_text":
                value.mul_(0.3)  # without a factor on scores, random heads are sharper than trained ones
        for name, value in model.named_buffers():
            if name.endswith(("layer_scalar", "expert_bias")):
                value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(folder)


def spec_of(folder: Path) -> ModelSpec:
    return model_from_config(json.loads((folder / "config.json").read_text()), folder.name, str(folder))


def weights_of(folder: Path, recipe: Recipe | str, store: Path) -> NeutralWeights:
    chosen = named_recipe(recipe) if isinstance(recipe, str) else recipe
    return neutral_weights(folder, chosen, store=ContentStore(store))


def reference_of(folder: Path, weights: NeutralWeights) -> Any:
    """transformers' own model, with the dequantised weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        kept = ("layer_scalar", "expert_bias")
        scalars = ((name, value) for name, value in model.named_buffers() if name.endswith(kept))
        for name, value in (*model.named_parameters(), *scalars):
            value.copy_(torch.from_numpy(_stored(weights, name)))
    return model.eval()


def _stored(weights: NeutralWeights, name: str) -> np.ndarray[Any, Any]:
    """A parameter of transformers' model, which holds all experts of a layer in one."""
    block, _, part = name.partition(".experts.")
    layer = block.rpartition(".")[0]
    if not part and ".mlp.gate.weight" in name and weights.model.family == "mixtral":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if not part:
        return np.array(weights.tensor(name))
    experts = weights.model.experts
    assert experts is not None
    if experts.layout == "stacks":
        return _stack(weights, layer, part)
    found = []
    for expert in range(experts.count):
        gate, up, down = (weights.tensor(f"{layer}.{module}.weight") for module in experts.modules(expert))
        found.append(down if part == "down_proj" else np.concatenate([gate, up]))
    return np.stack(found)


def _stack(weights: NeutralWeights, layer: str, part: str) -> np.ndarray[Any, Any]:
    """A stack of gpt-oss: [experts, inputs, outputs], or biases; outputs of gate and up alternate."""
    experts = weights.model.experts
    assert experts is not None
    kind = "bias" if part.endswith("_bias") else "weight"
    chosen = slice(2, 3) if part.startswith("down") else slice(0, 2)
    found = []
    for expert in range(experts.count):
        mine = [weights.tensor(f"{layer}.{module}.{kind}") for module in experts.modules(expert)[chosen]]
        found.append(np.stack(mine, axis=1).reshape(-1, *mine[0].shape[1:]).T)
    return np.stack(found)


def plan_for(
    model: ModelSpec,
    recipe: Recipe,
    *,
    context: int = 128,
    capacity: int | None = None,
    sequences: int = 4,
    chunk_tokens: int = 64,
    kv_bits: int = 32,
    exits: tuple[int, ...] = (),
    backend: str = "cpu",
    threads: int = 1,
    drafter: HeadSpec | None = None,
) -> Plan:
    return Plan(
        model=model,
        model_source="test",
        model_sha256="0" * 64,
        device="this",
        device_sha256="0" * 64,
        os_version="0",
        target="onnx",
        backend=backend,
        recipe=recipe,
        context=context,
        sequences=sequences,
        chunk_tokens=chunk_tokens,
        cache=KVEvictionPolicy(),
        storage=KVCacheConfig(capacity_tokens=capacity or context, kv_bits=kv_bits),
        exits=exits,
        drafter=drafter,
        threads=threads,
        estimate=Estimate(
            mapped_weights_bytes=0, private_weights_bytes=0, kv_bytes=0, activation_bytes=0, runtime_bytes=0
        ),
        memory=MemoryFacts(runtime_bytes=0, source="none"),
        budget_bytes=0,
        budget_why="a test",
        speed=Speed(prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0, first_token_s=1.0, basis="none"),
        quality=Quality(kl=0.0, same_top=1.0, basis="prior", source="none"),
    )


def quiet(done: float, total: float, what: str) -> None:
    """A progress callback that does nothing."""


def logits_of(reference: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """[token, vocabulary] of the whole text at once."""
    import torch

    with torch.no_grad():
        found: np.ndarray[Any, Any] = reference(torch.tensor([tokens])).logits[0].numpy()
    return found


def greedy_text(engine: Engine, state: State, prompt: Sequence[int], *, first: int = 0) -> list[int]:
    """Return the prompt, of which `first` tokens are fed alone, and 64 tokens that the engine chooses greedily."""
    text = list(prompt)
    if first:
        engine.forward([Chunk(state, text[:first], 0)])
    logits = engine.forward([Chunk(state, text[first:], 1)])[0]
    for _ in range(64):
        text = [*text, int(logits[-1].argmax())]
        logits = engine.forward([Chunk(state, text[-1:], 1)])[0]
    return text


def tokens_of(count: int, vocabulary: int = 160, seed: int = 7) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, vocabulary, count)]
