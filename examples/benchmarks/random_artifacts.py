"""Sealed artifacts of random decoders, to measure memory and speed on.

    python -m examples.benchmarks.random_artifacts FOLDER --shape llama-1b [--target onnx] [--recipe s4-g32]

The artifact is FOLDER/artifact-0, with a cache of 32 bits on onnx and 16 elsewhere, and a thread for each core. Its
neutral weights stay in FOLDER/weights-0, so that `edgekit bench --against` gives them to peers.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from edgekit.artifact.artifact import seal
from edgekit.artifact.tokenizer_memory import tokenizer_memory
from edgekit.common.cores import usable_cores
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.plan import Estimate, Plan, Quality, Speed
from edgekit.contracts.recipe import named_recipe
from edgekit.device.load import load_profile
from edgekit.plugins import load_target
from edgekit.quant.random_weights import random_weights

PLANNED_TOKENS = 8192
TOKENIZER = Path(__file__).parents[1] / "training" / "demo" / "target"


LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500_000.0,
}

QWEN2_500M: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1_000_000.0,
}

SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 100_000.0,
}

SHAPES = {"smollm2-135m": SMOLLM2_135M, "llama-1b": LLAMA_1B, "qwen2-500m": QWEN2_500M}


def random_shape(chance: random.Random) -> dict[str, Any]:
    """A decoder of 0.01 to 1.2 billion parameters, sizes spread evenly over the logarithm."""
    while True:
        head_dim = chance.choice((32, 64, 64, 128))
        kv_heads = chance.choice((1, 2, 4, 8))
        heads = kv_heads * chance.choice((1, 2, 4))
        hidden = heads * head_dim
        layers = chance.randint(4, 32)
        inner = round(hidden * chance.uniform(2, 4.5) / 128) * 128
        vocabulary = chance.choice((4096, 32_000, 49_152, 128_256))
        parameters = layers * hidden * (3 * inner + 2 * hidden) + vocabulary * hidden
        if 192 <= hidden <= 2560 and 1e7 <= parameters <= 1.2e9:
            return {
                "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
                "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
                "vocab_size": vocabulary, "max_position_embeddings": PLANNED_TOKENS, "tie_word_embeddings": True,
                "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10_000.0,
            }  # fmt: skip


def built(
    folder: Path,
    seed: int,
    of: tuple[dict[str, Any], str] | None = None,
    *,
    target: str = "onnx",
    tokenizer: Path = TOKENIZER,
    kv_bits: int = 32,
    threads: int | None = None,
    keep_weights: bool = False,
) -> Path:
    """Return a sealed artifact of a random shape, or of a config in a recipe; the one that an interrupted run left.

    The files of the tokenizer and its chat template are copied from the folder `tokenizer`. With `keep_weights`, the
    neutral weights stay next to the artifact, which names them as its model.
    """
    artifact = folder / f"artifact-{seed}"
    if artifact.exists():
        return artifact
    chance = random.Random(seed)
    config, recipe = of or (random_shape(chance), chance.choice(("s4-g32", "s4-g64", "s4-g128")))
    chunk, chosen = chance.choice((64, 128, 256, 512)), chance.choice((1, 2))
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        place = folder.absolute() / f"weights-{seed}" if keep_weights else Path(temporary) / "weights"
        weights = random_weights(place, config, named_recipe(recipe), "random")
        offers = load_target(target).offers(weights.model, load_profile("this"))
        facts = next(offer.memory for offer in offers if offer.recipe.name == recipe)
        taken = tokenizer_memory(tokenizer)
        if taken:
            read = {"tokenizer_bytes": taken.held, "tokenizer_reading_bytes": taken.reading}
            facts = facts.model_copy(update=read)
        nothing = Estimate(
            mapped_weights_bytes=0, private_weights_bytes=0, kv_bytes=0, activation_bytes=0, runtime_bytes=0
        )
        plan = Plan(
            model=weights.model, model_source=str(place) if keep_weights else "random", model_sha256="0" * 64,
            device="this", device_sha256="0" * 64,
            os_version="0", target=target, backend="cpu", recipe=weights.recipe, context=PLANNED_TOKENS, sequences=4,
            chunk_tokens=chunk, cache=KVEvictionPolicy(),
            storage=KVCacheConfig(capacity_tokens=PLANNED_TOKENS, kv_bits=kv_bits),
            threads=threads or chosen, estimate=nothing, memory=facts, budget_bytes=1 << 40, budget_why="figures",
            speed=Speed(prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0, first_token_s=1.0, basis="none"),
            quality=Quality(kl=0.0, same_top=1.0, basis="prior", source="none"),
        )  # fmt: skip
        staging = Path(temporary) / "staging"
        staging.mkdir()
        load_target(target).export(plan, weights, staging, lambda done, total, what: None)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tokenizer / name, staging)
            shutil.copy(tokenizer / name, place)
        seal(staging, artifact, plan, weights_sha256=weights.sha256, tools={}, self_check="none: figures")
    return artifact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--target", default="onnx")
    parser.add_argument("--recipe", default="s4-g32")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    bits = 32 if arguments.target == "onnx" else 16
    of = (SHAPES[arguments.shape], arguments.recipe)
    threads = usable_cores().number
    print(built(arguments.folder, 0, of, target=arguments.target, kv_bits=bits, threads=threads, keep_weights=True))


if __name__ == "__main__":
    main()
