"""Small random Gemma 4 models and assistants of them, as published, and transformers' own reading of an assistant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
from safetensors_files import write_tensors

from edgekit.formats.safetensors import TensorFolder

ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
VOCABULARY = 360  # a few more than the tokenizer has, so that clusters divide them
SHAPE: dict[str, Any] = {
    "model_type": "gemma4_text", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
    "global_head_dim": 64, "sliding_window": 12, "rope_parameters": ROPES, "max_position_embeddings": 512,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
}  # fmt: skip
MODEL: dict[str, Any] = {
    **SHAPE, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCABULARY, "vocab_size": VOCABULARY,
    "num_kv_shared_layers": 2, "final_logit_softcapping": 30.0,
}  # fmt: skip
NORMS = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
HIDDEN, INNER, CLUSTERS = 48, 96, 20


def write_gemma4(folder: Path, **changed: Any) -> Path:
    """A small Gemma 4 with a tokenizer. The last layers that store keys and values are 3 (full) and 2 (sliding)."""
    tiny_models.write_tiny(folder, **{**MODEL, **changed})
    with TensorFolder.open(folder) as whole:
        tensors = {name: whole.array(name).copy() for name in whole.entries}
    for name, values in tensors.items():
        if name.endswith("layer_scalar"):
            values += 1
        if "q_norm" in name:
            values *= 0.3  # without a factor on scores, random heads are sharper than trained ones
    write_tensors(folder, tensors)
    return folder


def write_assistant(
    folder: Path,
    model: Path,
    *,
    clusters: int | None = None,
    active: int = 3,
    seed: int = 0,
    tensors: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **text: Any,
) -> Path:
    """A random assistant of `model`, as its own repository has it. `tensors` changes what is written; None removes."""
    folder.mkdir()
    target = json.loads((model / "config.json").read_text())
    backbone, vocabulary = target["hidden_size"], target["vocab_size"]
    sizes = {
        **SHAPE, "num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_kv_shared_layers": 4, "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": vocabulary,
        "rms_norm_eps": target["rms_norm_eps"], "tie_word_embeddings": True, **text,
    }  # fmt: skip
    written = {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "text_config": sizes,
        "backbone_hidden_size": backbone, "use_ordered_embeddings": clusters is not None,
        "num_centroids": clusters or 2048, "centroid_intermediate_top_k": active, "tie_word_embeddings": True,
        **(config or {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(written))
    draw = np.random.default_rng(seed + 200)
    made = {
        name: (draw.standard_normal(shape) * 0.2).astype(np.float32)
        for name, shape in _shapes(sizes, backbone, vocabulary, clusters).items()
    }
    for name, values in made.items():
        if "norm" in name or name.endswith("layer_scalar"):
            values += 0.3 if "q_norm" in name else 1
    if clusters:
        made["masked_embedding.token_ordering"] = draw.permutation(vocabulary).astype(np.int64)
    write_tensors(folder, {name: value for name, value in {**made, **(tensors or {})}.items() if value is not None})
    return folder


def _shapes(sizes: dict[str, Any], backbone: int, vocabulary: int, clusters: int | None) -> dict[str, tuple[int, ...]]:
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "pre_projection.weight": (hidden, 2 * backbone),
        "post_projection.weight": (backbone, hidden),
    }
    if clusters:
        shapes["masked_embedding.centroids.weight"] = clusters, hidden
    for index, kind in enumerate(sizes["layer_types"]):
        width = sizes["global_head_dim" if kind == "full_attention" else "head_dim"]
        name, queries = f"model.layers.{index}.", sizes["num_attention_heads"] * width
        shapes |= {
            f"{name}{norm}.weight": (hidden,)
            for norm in NORMS
        } | {
            f"{name}layer_scalar": (1,), f"{name}self_attn.q_norm.weight": (width,),
            f"{name}self_attn.q_proj.weight": (queries, hidden), f"{name}self_attn.o_proj.weight": (hidden, queries),
            f"{name}mlp.gate_proj.weight": (inner, hidden), f"{name}mlp.up_proj.weight": (inner, hidden),
            f"{name}mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip
    return shapes


def torch_logits(folder: Path, embedded: Any, hidden: Any, kv: dict[str, Any], position: int) -> Any:
    """transformers' logits of a chain of drafted tokens, whose scaled embeddings are `embedded` [token, width].

    `hidden` is the target's hidden state after its last norm, and `kv` has keys and values [kv_head, token, head_dim]
    by the kind of layer. Rows of the head are rounded to 16 bits, as they are sealed with clusters.
    """
    import torch

    model = _torch_assistant(folder)
    shared = {kind: tuple(torch.tensor(np.array(each))[None] for each in pair) for kind, pair in kv.items()}
    last, rows = torch.tensor(np.asarray(hidden)).reshape(1, 1, -1), []
    with torch.no_grad():
        if model.config.use_ordered_embeddings:
            model.lm_head.weight.copy_(model.lm_head.weight.half().float())
        for row in embedded:
            found = model(
                inputs_embeds=torch.cat([torch.tensor(np.asarray(row)).reshape(1, 1, -1), last], -1),
                position_ids=torch.tensor([[position]]), shared_kv_states=shared, use_cache=False,
            )  # fmt: skip
            last = found.last_hidden_state
            rows.append(found.logits[0, 0].numpy())
    return np.stack(rows)


def torch_draft(model: Path, folder: Path, tokens: list[int], count: int) -> list[int]:
    """The first tokens that transformers drafts, with its own target and generation, after the last of `tokens`."""
    import torch
    from transformers import Gemma4ForCausalLM
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

    target = Gemma4ForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    assistant = _torch_assistant(folder)
    assistant.generation_config.num_assistant_tokens = count
    options, text = SinglePositionMultiTokenCandidateGenerator.model_kwargs_overrides, torch.tensor([tokens])
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant, target.get_input_embeddings(), target.generation_config
    )
    generator.main_model_max_length = 10**6
    with torch.no_grad():
        outputs = target(text[:, :-1], **options)
        found, _ = generator.get_candidates(text, {}, outputs, is_first_iteration=False, n_last_matches=0)
    drafted: list[int] = found[0, len(tokens) :].tolist()
    return drafted


def _torch_assistant(folder: Path) -> Any:
    import torch
    from transformers import Gemma4AssistantForCausalLM

    return Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
