"""Artifacts of a forger who seals anew: any model that a plan can describe, and a GGUF file that agrees with the plan.

    python tests/helpers/forged_models.py --seed 0 --count 200

The target opens each and computes a few calls in both modes. One line a case says what came of it; a process that
dies leaves the number of its case as its last word.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import family_models as models
import numpy as np
from edgekit_llamacpp import LlamaCppTarget
from edgekit_llamacpp.engine import LlamaCppEngine
from edgekit_llamacpp.layout import WEIGHTS
from numpy.typing import NDArray
from pydantic import ValidationError

from edgekit.contracts.engine import Chunk
from edgekit.contracts.plan import Plan
from edgekit.errors import EdgekitError
from edgekit.formats.gguf_types import TYPES
from edgekit.formats.gguf_writer import TYPE_IDS, MetadataValue, WrittenTensor, write_gguf
from edgekit.model.families import model_from_config
from edgekit.model.spec import ModelSpec
from edgekit.quant.neutral_gguf import model_metadata, stored_types

MOST_BYTES = 4 << 20  # of a file
MOST_MEMORY = 4 << 30  # of the process: sizes that a machine does not have must fail, and not be given
SIZES = (1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 48, 64, 80, 96, 128, 256, 257, 512)
NUMBERS = (1e-30, 1e-9, 1e-3, 0.5, 1.0, 1.0000001, 2.0, 50.0, 1e4, 1e9)
TOKENS = (1, 2, 3, 31, 255, 256, 257, 4096, 1 << 20, 1 << 28)
RECIPES = ("float32", "float16", "bfloat16", "s8", "s4-g32", "s4-g128", "balanced")
TEXTS = ("", "x" * 9000, "\0", "%s%n", "llama", "none")
CHOICES: dict[str, tuple[Any, ...]] = {
    "hidden_size": SIZES, "intermediate_size": SIZES, "heads": SIZES[:9], "vocab_size": SIZES, "max_positions": TOKENS,
    "norm_epsilon": (0.0, 1e-30, 1e-6, 1.0), "name": TEXTS, "attention_scale": NUMBERS, "attention_softcap": NUMBERS,
    "logit_softcap": NUMBERS, "tied": (True, False), "qk_norm": (True, False), "qkv_bias": (True, False),
    "norm_offset": (True, False), "embedding_scale": NUMBERS,
}  # fmt: skip
OF_LAYERS: dict[str, tuple[Any, ...]] = {
    "kv_heads": SIZES[:8], "head_dim": SIZES, "window": (None, *TOKENS), "rope": (None, "default"),
}  # fmt: skip
OF_ROPES: dict[str, tuple[Any, ...]] = {
    "theta": (1.0000001, 2.0, 1e4, 1e15), "dim": (2, 4, 6, 16, 62, 64, 128, 256), "factor": NUMBERS,
    "kind": ("default", "linear", "yarn", "llama3"), "original_positions": TOKENS, "beta_fast": NUMBERS,
    "beta_slow": NUMBERS, "attention_factor": (0.0, *NUMBERS), "low_freq_factor": NUMBERS, "high_freq_factor": NUMBERS,
}  # fmt: skip
OF_PLANS: dict[str, tuple[Any, ...]] = {
    "context": TOKENS, "sequences": (1, 2, 7, 256, 257, 4096), "chunk_tokens": (1, 2, 3, 63, 64, 512, 65536),
    "kv_bits": (4, 8, 16, 32, 2, 64), "threads": (1, 2, 3),
}  # fmt: skip
# Of the tokenizer, which edgekit does not read from this file and llama.cpp is told not to.
FOREIGN_KEYS: tuple[tuple[str, MetadataValue], ...] = (
    ("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.model", 7), ("tokenizer.ggml.tokens", ["a"] * 5),
    ("tokenizer.ggml.tokens", np.zeros(9, np.int32)), ("tokenizer.ggml.token_type", ["x"]),
    ("tokenizer.ggml.bos_token_id", "text"), ("tokenizer.ggml.merges", "a b"), ("tokenizer.chat_template", True),
    ("tokenizer.ggml.scores", np.full(3, np.nan, np.float32)), ("general.quantization_version", "two"),
    ("tokenizer.ggml.pre", "%s"), ("tokenizer.ggml.vocab_size", 0), ("tokenizer.ggml." + "y" * 200, 1),
)  # fmt: skip


def forged(seed: int, folder: Path) -> Plan | None:
    """Write a file of random bytes and return the plan that it agrees with; None if such a plan is refused."""
    draw = random.Random(seed)
    kind, config = draw.choice(list(models.OF_TARGETS["llamacpp"].values()))
    spec = json.loads(model_from_config({"model_type": kind, **config}, "forged", "forged").model_dump_json())
    _change(draw, spec, CHOICES, 2)
    layers = spec["layers"] = spec["layers"][: draw.choice((1, 2, 3))]
    changes = _changes(draw, OF_LAYERS, 1)
    for layer in layers:
        layer.update(changes)
    for rope in spec["ropes"].values():
        _change(draw, rope, OF_ROPES, draw.choice((0, 1, 3)))
    asked = {"context": 128, "sequences": 2, "kv_bits": 16} | _changes(draw, OF_PLANS, 2)
    try:
        model = ModelSpec.model_validate_json(json.dumps(spec))
        plan: Plan = models.plan_for(model, models.named_recipe(draw.choice(RECIPES)), **asked)
    except (ValidationError, EdgekitError):
        return None
    try:
        LlamaCppTarget().check(plan)
        _write(draw, plan, folder / WEIGHTS)
    except EdgekitError:
        return None
    return plan


def _write(draw: random.Random, plan: Plan, path: Path) -> None:
    """Write the file that the plan asks for, with random weights: any bits, small floats, or none at all."""
    make = draw.choice((np.random.default_rng(draw.randrange(1 << 30)).bytes, _small, bytes))
    tensors = [
        WrittenTensor(name, kind, shape, lambda kind=kind, shape=shape: _bytes(kind, shape, make))  # type: ignore[misc]
        for name, (kind, shape) in stored_types(plan.model, plan.recipe, plan.context).items()
    ]
    if sum(tensor.bytes for tensor in tensors) > MOST_BYTES:
        raise EdgekitError("too large for a test")
    metadata = model_metadata(plan.model, plan.context) | {"tokenizer.ggml.model": "none"}
    write_gguf(path, metadata | dict(draw.sample(FOREIGN_KEYS, draw.choice((0, 0, 1, 3)))), tensors)


def _small(count: int) -> bytes:
    return np.resize(np.frombuffer(b"\x11\x1c", np.uint8), count).tobytes()  # 0.004 in float16, and in Q4_0's scales


def _bytes(kind: str, shape: tuple[int, ...], make: Any) -> Iterator[NDArray[np.uint8]]:
    block = TYPES[TYPE_IDS[kind]]
    yield np.frombuffer(make(math.prod(shape) // block.values * block.bytes), np.uint8)


def _changes(draw: random.Random, choices: dict[str, tuple[Any, ...]], most: int) -> dict[str, Any]:
    return {name: draw.choice(choices[name]) for name in draw.sample(sorted(choices), draw.randint(0, most))}


def _change(draw: random.Random, values: dict[str, Any], choices: dict[str, tuple[Any, ...]], most: int) -> None:
    values.update(_changes(draw, choices, most))


def run(plan: Plan, folder: Path, *, exact: bool) -> str:
    """Open the artifact and compute; return what came of it."""
    try:
        engine = LlamaCppEngine(plan, folder, exact=exact)
        states = [engine.start(plan.storage) for _ in range(min(2, plan.sequences))]
        room = min(plan.storage.capacity_tokens, engine.capabilities.max_chunk_tokens, 80)
        last = plan.model.vocab_size - 1
        engine.forward([Chunk(state, [last] * room, 1) for state in states])
        states[0].rewind(room // 2)
        if engine.capabilities.can_evict and states[0].length > 1:
            states[0].evict(0, 1)
        engine.forward([Chunk(state, [0], 1) for state in states[:1]])
        if engine.capabilities.can_save:
            states[1 % len(states)].save(0, 1)
        engine.close()
    except EdgekitError as error:
        return f"{type(error).__name__}: {str(error)[:90]}"
    return "ran"


def say(text: str) -> None:
    """Print at once: the next call may end the process."""
    sys.stdout.write(text)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    for seed in range(asked.seed, asked.seed + asked.count):
        with tempfile.TemporaryDirectory() as place:
            plan = forged(seed, Path(place))
            for exact in (False, True) if plan is not None else ():
                say(f"{seed} {'exact' if exact else 'fast'}: ")
                say(f"{run(plan, Path(place), exact=exact)}\n")


if __name__ == "__main__":
    main()
