"""Random EAGLE-3 heads in both published layouts, and a plain torch reading of them that shares no code with ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors_files import write_tensors

from edgekit.contracts.engine import Chunk
from edgekit.enginekit.base import EngineBase
from edgekit.model.spec import ModelSpec

LEGACY, SPECULATORS = "LlamaForCausalLMEagle3", "speculators"


def write_head(
    folder: Path,
    target: ModelSpec,
    layout: str = LEGACY,
    *,
    layers: tuple[int, ...] = (1, 2, 2),
    draft_vocabulary: int | None = None,
    embedding: bool = True,
    kind: str = "llama",
    seed: int = 0,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
    **layer_config: Any,
) -> Path:
    """A random head for `target`. `config` and `tensors` change what is written; None removes."""
    folder.mkdir(parents=True)
    hidden, heads, kv_heads, head_dim, inner = target.hidden_size, 4, 2, 8, 48
    count = draft_vocabulary or target.vocab_size
    sizes: dict[str, Any] = {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": target.vocab_size, "rms_norm_eps": 1e-5,
        "num_hidden_layers": 1, "hidden_act": "silu", "max_position_embeddings": 4096, "rope_theta": 10000.0,
    } | layer_config  # fmt: skip
    asked = config or {}
    if layout == LEGACY:
        written = {
            "architectures": [LEGACY], **sizes, "draft_vocab_size": count,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
        }  # fmt: skip
    else:
        written = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": count,
            "eagle_aux_hidden_state_layer_ids": list(layers), "transformer_layer_config": sizes,
            "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
        }  # fmt: skip
    written = {name: value for name, value in {**written, **asked}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written))
    layer = "midlayer." if layout == LEGACY else "layers.0."
    width = len(layers) * hidden
    shapes = {
        "fc.weight": (hidden, width), f"{layer}hidden_norm.weight": (hidden,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, heads * head_dim),
        f"{layer}post_attention_layernorm.weight": (hidden,), f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden), f"{layer}mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,), "lm_head.weight": (count, hidden),
    }  # fmt: skip
    if kind == "qwen3":
        shapes |= {f"{layer}self_attn.{norm}.weight": (head_dim,) for norm in ("q_norm", "k_norm")}
    if embedding:
        shapes["embed_tokens.weight"] = (target.vocab_size, hidden)
    if written.get("norm_before_fc"):
        shapes["input_norm.weight"] = (width,)
    if written.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (hidden,) for index in range(len(layers))}
    draw = np.random.default_rng(seed)
    made: dict[str, Any] = {
        name: (draw.standard_normal(shape) * 0.2 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    if count < target.vocab_size:
        chosen = np.sort(draw.choice(target.vocab_size, count, replace=False)).astype(np.int64)
        made["d2t"] = chosen - np.arange(count)
        made["t2d"] = np.isin(np.arange(target.vocab_size), chosen)
    made = {name: value for name, value in {**made, **(tensors or {})}.items() if value is not None}
    write_tensors(folder, made)
    return folder


def features_of(engine: EngineBase[Any, Any], tokens: list[int], sizes: list[int], kv_bits: int = 0) -> Any:
    """The hidden states of `tokens` that an engine gives when it is fed calls of these sizes."""
    storage = engine.plan.storage.model_copy(update={"kv_bits": kv_bits or engine.plan.storage.kv_bits})
    state, hidden = engine.start(storage), np.empty((len(tokens), engine.capabilities.feature_width), "f4")
    for start, stop in zip(np.cumsum([0, *sizes]), np.cumsum(sizes), strict=False):
        engine.forward([Chunk(state, tokens[start:stop], 1, features=hidden[start:stop])])
    state.close()
    return hidden


def torch_features(model: Any, tokens: list[int], layers: tuple[int, ...]) -> Any:
    """The hidden states after `layers` of transformers' model, side by side as a head reads them."""
    import torch

    found: dict[int, Any] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out, at=index + 1: found.update({at: out[0] if isinstance(out, tuple) else out})
        )
        for index, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return np.concatenate([found[layer].reshape(len(tokens), -1).numpy() for layer in layers], axis=1)


def torch_logits(folder: Path, hidden: Any, tokens: list[int], drafted: list[int], table: Any = None) -> Any:
    """The head's logits over the target's vocabulary: after `tokens`, and after each of `drafted` tokens.

    `hidden` are the target's hidden states [tokens, width]; token i + 1 is paired with those of token i. `table` is the
    target's embedding, for heads without their own. Everything is computed at once from the start, without a cache.
    """
    import torch
    from safetensors.torch import load_file
    from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

    config = json.loads((folder / "config.json").read_text())
    sizes = config.get("transformer_layer_config", config)
    weights = {
        name.replace("midlayer.", "layers.0."): value for name, value in load_file(folder / "model.safetensors").items()
    }
    eps, heads, kv_heads, width = (
        sizes[name] for name in ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim")
    )

    def norm(x: Any, name: str) -> Any:
        return rms_norm(x, (x.shape[-1],), weights[f"{name}.weight"].float(), eps)

    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].float().T

    def turned(x: Any) -> Any:
        inverse = sizes["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(x.shape[1])[:, None] * inverse
        cosines, sines = (torch.cat([curve(angles)] * 2, -1) for curve in (torch.cos, torch.sin))
        half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return x * cosines + half * sines

    x = torch.tensor(np.asarray(hidden))
    if config.get("norm_before_fc"):
        x = norm(x, "input_norm")
    if config.get("fc_norm"):
        x = torch.cat(
            [norm(part, f"fc_norm.{i}") for i, part in enumerate(x.split(weights["norm.weight"].shape[0], -1))], -1
        )
    x = linear(x, "fc")
    embedding = torch.tensor(np.asarray(table)) if table is not None else weights["embed_tokens.weight"].float()
    fed, rows = tokens[1:], []
    while True:
        embedded, normed = norm(embedding[fed], "layers.0.input_layernorm"), norm(x, "layers.0.hidden_norm")
        both, count = torch.cat([embedded, normed], -1), len(fed)
        parts = {
            name: linear(both, f"layers.0.self_attn.{name}_proj").view(count, number, width).transpose(0, 1)
            for name, number in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        }
        if sizes["model_type"] == "qwen3":
            parts |= {name: norm(parts[name], f"layers.0.self_attn.{name}_norm") for name in ("q", "k")}
        mixed = scaled_dot_product_attention(
            turned(parts["q"])[None], turned(parts["k"])[None], parts["v"][None], is_causal=True, enable_gqa=True
        )[0]
        residual = normed if config.get("norm_before_residual") else x
        y = residual + linear(mixed.transpose(0, 1).reshape(count, -1), "layers.0.self_attn.o_proj")
        z = norm(y, "layers.0.post_attention_layernorm")
        y = y + linear(
            silu(linear(z, "layers.0.mlp.gate_proj")) * linear(z, "layers.0.mlp.up_proj"), "layers.0.mlp.down_proj"
        )
        last = norm(y, "norm")
        logits = linear(last, "lm_head")[-1]
        targets = torch.arange(len(logits)) + weights.get("d2t", torch.zeros(len(logits), dtype=torch.int64))
        spread = torch.full((sizes["vocab_size"],), -torch.inf)
        spread[targets] = logits
        rows.append(spread.numpy())
        if len(rows) > len(drafted):
            return np.stack(rows)
        x = torch.cat([x, (last if config.get("norm_output") else y)[-1:]])
        fed = [*fed, drafted[len(rows) - 1]]
