"""Writes a random model and a random EAGLE-3 head for it, to measure what a head costs and what a useless one loses.

    python -m examples.benchmarks.random_head FOLDER --shape llama-1b
    edgekit export FOLDER/model --recipe s4-g32 --drafter FOLDER/head -o ARTIFACT
    python -m examples.benchmarks.head_speeds ARTIFACT --drafts head

FOLDER must not exist.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from edgekit.contracts.recipe import named_recipe
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.eagle3 import LEGACY, default_layers
from edgekit.model.families import model_from_config
from edgekit.model.head_spec import HeadSpec
from edgekit.quant.random_weights import random_weights
from edgekit.quant.source_files import copy_companions
from examples.benchmarks.random_artifacts import TOKENIZER
from examples.benchmarks.random_models import SHAPES


def write_head(folder: Path, target: dict[str, Any], draft_tokens: int) -> None:
    """A head of one layer in the target's sizes, without an embedding of its own, in the authors' layout."""
    vocabulary, layers = target["vocab_size"], default_layers(target["num_hidden_layers"])
    sizes = {**target, "num_hidden_layers": 1, "tie_word_embeddings": False}
    layer = model_from_config(sizes, "head", "head")
    spec = HeadSpec(
        layer=layer, draft_vocab_size=draft_tokens, target_hidden_size=layer.hidden_size, hidden_layers=layers,
        sha256="0" * 64,
    )  # fmt: skip
    chosen = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}, "draft_vocab_size": draft_tokens}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [LEGACY], **sizes, **chosen}, indent=1))
    draw = np.random.default_rng(1)
    drafted = np.sort(draw.choice(vocabulary, draft_tokens, replace=False))
    shapes = dict(spec.tensors())
    stored = {name: ("F32", shape) for name, shape in shapes.items()}
    stored |= {"d2t": ("I64", (draft_tokens,)), "t2d": ("BOOL", (vocabulary,))}
    with TensorWriter(folder / "model.safetensors", stored) as writer:
        for name, shape in shapes.items():
            values = draw.standard_normal(shape, np.float32) * np.float32(0.02) + np.float32(len(shape) == 1)
            writer.write(name, values)
        writer.write("d2t", drafted - np.arange(draft_tokens))
        writer.write("t2d", np.isin(np.arange(vocabulary), drafted))
        writer.seal()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-1b")
    parser.add_argument("--draft-tokens", type=int, default=8192)
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    random_weights(given.folder / "model", SHAPES[given.shape], named_recipe("s4-g32"), "random")
    copy_companions(TOKENIZER, given.folder / "model")
    write_head(given.folder / "head", SHAPES[given.shape], given.draft_tokens)


if __name__ == "__main__":
    main()
