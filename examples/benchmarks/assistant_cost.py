"""Measures a drafted token of a random Gemma 4 assistant, as JSON: the least milliseconds, by the length of the text.

    OPENBLAS_NUM_THREADS=1 python -m examples.benchmarks.assistant_cost FOLDER

Its sizes are assumed: 4 layers of width 256 with 4 heads, 2,048 clusters of 262,144 tokens, of which 32 are read, and a
model of width 1,536 whose embeddings, keys and values of one head are read from arrays. They come near the 159 MB of
the published assistant of E4B; its config could not be fetched.
"""

from __future__ import annotations

import argparse
import json
import os
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from edgekit.contracts.engine import CachedKV
from edgekit.formats.safetensors import TensorFolder
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.methods.drafters.assistant_decoder import AssistantDecoder, Seen
from edgekit.model.families import model_from_config
from edgekit.model.head_spec import HEAD, HeadSpec
from edgekit.model.heads import HeadWeights

LAYERS: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262144,
    "hidden_size_per_layer_input": 0, "sliding_window": 512, "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
TARGET, TOKENS = 1536, (256, 1024, 8192)
ROUNDS = 60


def spec() -> HeadSpec:
    layer = model_from_config(LAYERS, "assistant", "assistant")
    return HeadSpec(
        kind="assistant", layer=layer, draft_vocab_size=layer.vocab_size, target_hidden_size=TARGET,
        hidden_layers=(35,), norm_output=True, kv_layers=(0, 0, 0, 1), clusters=2048,
        active_clusters=32, sha256="0" * 64,
    )  # fmt: skip


def random_head(folder: Path) -> HeadWeights:
    head, draw = spec(), np.random.default_rng(0)
    shapes = dict(head.tensors())
    kinds = {name: "F16" if name == HEAD else "F32" for name in shapes}
    with TensorWriter(folder / "model.safetensors", {name: (kinds[name], shapes[name]) for name in shapes}) as writer:
        for name, shape in shapes.items():
            for start in range(0, shape[0], 4096):
                size = (min(4096, shape[0] - start), *shape[1:])
                values = draw.standard_normal(size, np.float32) * np.float32(0.02)
                writer.write(name, values.astype(np.float16 if kinds[name] == "F16" else np.float32), start)
        writer.seal()
    return HeadWeights(
        head, LAYERS, np.arange(head.draft_vocab_size), TensorFolder.open(folder), {n: n for n in shapes}
    )


def measured(model: AssistantDecoder, tokens: int, kind: type[Any]) -> dict[str, float]:
    draw = np.random.default_rng(1)
    kv = {layer: (draw.standard_normal((1, tokens, width)) * 9).astype(kind) for layer, width in ((0, 256), (1, 512))}

    def read(layer: int, start: int, stop: int) -> CachedKV:
        part = kv[layer][:, start:stop]
        return CachedKV(*(part if kind is np.float32 else part.astype(np.float32) for _ in range(2)))

    rows = draw.standard_normal((ROUNDS, TARGET), np.float32)
    seen, hidden, times = (
        Seen(read, lambda ids: rows[list(ids)], tokens, tokens),
        draw.standard_normal(TARGET, np.float32),
        [],
    )
    for token in range(ROUNDS):
        started = perf_counter()
        drafted = model.forward(seen, token, hidden)
        between = perf_counter()
        model.logits(drafted.normed)
        times.append((between - started, perf_counter() - between))
    layers, head = np.array(times).min(axis=0)
    return {"layers_ms": round(1e3 * layers, 3), "head_ms": round(1e3 * head, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True)
    model = AssistantDecoder(random_head(folder))
    values = sum(prod(shape) for _, shape in model.spec.tensors())
    found = {
        f"{tokens} tokens, {kind.__name__}": measured(model, tokens, kind)
        for tokens in TOKENS
        for kind in (np.float32, np.int8)
    }
    print(json.dumps({"parameters": values, "load": os.getloadavg()[0], "by": found}, indent=1))


if __name__ == "__main__":
    main()
