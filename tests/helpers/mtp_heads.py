"""Random MTP parts of small Qwen3.5 checkpoints, and a plain torch reading of them that shares no code with ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
from safetensors_files import write_tensors

from edgekit.formats.safetensors import TensorFolder

QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
HEADS, KV_HEADS, WIDTH, ROTATED, EPSILON, THETA = 4, 2, 64, 16, 1e-5, 10000.0


def write_mtp_model(folder: Path, *, seed: int = 0, tensors: dict[str, Any] | None = None, **changed: Any) -> Path:
    """A small hybrid Qwen3.5 whose checkpoint has an MTP part. `tensors` changes the part; None removes."""
    tiny_models.write_tiny(folder, **{**QWEN3_5, **changed})
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, queries, keys = config["hidden_size"], config["intermediate_size"], HEADS * WIDTH, KV_HEADS * WIDTH
    shapes = {
        "fc": (hidden, 2 * hidden), "pre_fc_norm_embedding": (hidden,), "pre_fc_norm_hidden": (hidden,),
        "norm": (hidden,), "layers.0.input_layernorm": (hidden,), "layers.0.post_attention_layernorm": (hidden,),
        "layers.0.self_attn.q_proj": (2 * queries, hidden), "layers.0.self_attn.k_proj": (keys, hidden),
        "layers.0.self_attn.v_proj": (keys, hidden), "layers.0.self_attn.o_proj": (hidden, queries),
        "layers.0.self_attn.q_norm": (WIDTH,), "layers.0.self_attn.k_norm": (WIDTH,),
        "layers.0.mlp.gate_proj": (inner, hidden), "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    draw = np.random.default_rng(seed + 100)
    made: dict[str, Any] = {
        f"mtp.{name}.weight": (draw.standard_normal(shape) * 0.2).astype(np.float32) for name, shape in shapes.items()
    }
    made = {name: value for name, value in {**made, **(tensors or {})}.items() if value is not None}
    with TensorFolder.open(folder) as whole:
        write_tensors(folder, {name: whole.array(name).copy() for name in whole.entries} | made)
    return folder


def part_alone(model: Path, folder: Path) -> Path:
    """A folder with the model's config and its `mtp.*` tensors, and nothing else."""
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    with TensorFolder.open(model) as whole:
        write_tensors(folder, {name: whole.array(name).copy() for name in whole.entries if name.startswith("mtp.")})
    return folder


def torch_mtp_logits(model: Path, shared: dict[str, Any], hidden: Any, tokens: list[int], drafted: list[int]) -> Any:
    """The part's logits over the whole vocabulary: after `tokens`, and after each of `drafted` tokens.

    `hidden` are the target's hidden states after its last layer; token i + 1 is paired with that of token i. `shared`
    are the target's embedding, last norm and head. Everything is computed at once from the start, without a cache:

        x = fc([norm_e(embedding of token i + 1), norm_h(last norm of the target(hidden state of token i))])
        x = x + o(sigmoid(gate) * attention(norm(x))),  x = x + mlp(norm(x)),  logits = head(norm(x))

    where every norm multiplies by 1 + its weight, and norm(x) of a drafted token takes the place of the target's.
    """
    import torch
    from safetensors.torch import load_file
    from torch.nn.functional import scaled_dot_product_attention, silu

    weights = {
        name.removeprefix("mtp.").removesuffix(".weight"): value
        for name, value in load_file(model / "model.safetensors").items()
        if name.startswith("mtp.")
    }
    target = {name: torch.tensor(np.asarray(value)) for name, value in shared.items()}

    def normed(x: Any, weight: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * (1 + weight)

    def turned(x: Any) -> Any:  # the first values of each head, in halves
        turning, still = x[..., :ROTATED], x[..., ROTATED:]
        inverse = THETA ** (-torch.arange(0, ROTATED, 2) / ROTATED)
        angles = torch.arange(x.shape[-2])[:, None] * inverse
        cosines, sines = (torch.cat([curve(angles)] * 2, -1) for curve in (torch.cos, torch.sin))
        half = torch.cat([-turning[..., ROTATED // 2 :], turning[..., : ROTATED // 2]], -1)
        return torch.cat([turning * cosines + half * sines, still], -1)

    read, fed, rows = normed(torch.tensor(np.asarray(hidden)), target["norm"]), tokens[1:], []
    attention = "layers.0.self_attn."
    while True:
        count = len(fed)
        embedded = normed(target["embedding"][fed], weights["pre_fc_norm_embedding"])
        x = torch.cat([embedded, normed(read, weights["pre_fc_norm_hidden"])], -1) @ weights["fc"].T
        y = normed(x, weights["layers.0.input_layernorm"])
        both = (y @ weights[f"{attention}q_proj"].T).view(count, HEADS, 2 * WIDTH)
        query, gate = both[..., :WIDTH], both[..., WIDTH:]
        key = (y @ weights[f"{attention}k_proj"].T).view(count, KV_HEADS, WIDTH)
        value = (y @ weights[f"{attention}v_proj"].T).view(count, KV_HEADS, WIDTH)
        query = turned(normed(query, weights[f"{attention}q_norm"]).transpose(0, 1))
        key = turned(normed(key, weights[f"{attention}k_norm"]).transpose(0, 1))
        mixed = scaled_dot_product_attention(
            query[None], key[None], value.transpose(0, 1)[None], is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        x = x + (mixed * torch.sigmoid(gate)).reshape(count, -1) @ weights[f"{attention}o_proj"].T
        z = normed(x, weights["layers.0.post_attention_layernorm"])
        gated = silu(z @ weights["layers.0.mlp.gate_proj"].T) * (z @ weights["layers.0.mlp.up_proj"].T)
        out = normed(x + gated @ weights["layers.0.mlp.down_proj"].T, weights["norm"])
        rows.append((out[-1] @ target["head"].T).numpy())
        if len(rows) > len(drafted):
            return np.stack(rows)
        read, fed = torch.cat([read, out[-1:]]), [*fed, drafted[len(rows) - 1]]
