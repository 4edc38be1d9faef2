"""Writes a random model and a random EAGLE-3 head for it, to measure what a head costs and what a useless one loses.

python -m examples.benchmarks.random_head FOLDER --shape llama-1b
edgekit export FOLDER/model --recipe s4-g32 --drafter FOLDER/head -o ARTIFACT
python -m examples.benchmarks.head_speeds ARTIFACT --drafts head
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from edgekit.contracts.recipe import named_recipe
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.source import TOKENIZER_FILES
from edgekit.quant.random_weights import random_weights
from examples.benchmarks.random_artifacts import TOKENIZER
from examples.benchmarks.random_models import SHAPES


def write_head(folder: Path, target: dict[str, Any], draft_tokens: int) -> None:
    """A head of one layer in the target's sizes, without an embedding of its own, in the layout of `eagle3`."""
    hidden, inner, vocabulary = target["hidden_size"], target["intermediate_size"], target["vocab_size"]
    heads, kv_heads = target["num_attention_heads"], target["num_key_value_heads"]
    width, layers = target.get("head_dim", hidden // heads), target["num_hidden_layers"]
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width,
        "vocab_size": vocabulary, "draft_vocab_size": draft_tokens, "num_hidden_layers": 1, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": target["rope_theta"], "max_position_embeddings": 4096,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    layer = "midlayer."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,), "lm_head.weight": (draft_tokens, hidden),
        f"{layer}hidden_norm.weight": (hidden,), f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (heads * width, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": (kv_heads * width, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": (kv_heads * width, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, heads * width),
        f"{layer}mlp.gate_proj.weight": (inner, hidden), f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
    }  # fmt: skip
    draw = np.random.default_rng(1)
    chosen = np.sort(draw.choice(vocabulary, draft_tokens, replace=False))
    stored: dict[str, tuple[str, tuple[int, ...]]] = {name: ("F32", shape) for name, shape in shapes.items()}
    stored |= {"d2t": ("I64", (draft_tokens,)), "t2d": ("BOOL", (vocabulary,))}
    with TensorWriter(folder / "model.safetensors", stored) as writer:
        for name, shape in shapes.items():
            values = draw.standard_normal(shape, np.float32) * np.float32(0.02) + np.float32(len(shape) == 1)
            writer.write(name, values)
        writer.write("d2t", chosen - np.arange(draft_tokens))
        writer.write("t2d", np.isin(np.arange(vocabulary), chosen))
        writer.seal()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-1b")
    parser.add_argument("--draft-tokens", type=int, default=8192)
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    random_weights(given.folder / "model", SHAPES[given.shape], named_recipe("s4-g32"), "random")
    for name in TOKENIZER_FILES:
        if (TOKENIZER / name).exists():
            shutil.copyfile(TOKENIZER / name, given.folder / "model" / name)
    write_head(given.folder / "head", SHAPES[given.shape], given.draft_tokens)


if __name__ == "__main__":
    main()
