"""Figures of the executorch target on this machine: a random model of half a billion parameters, S4.

    python -m examples.benchmarks.executorch_figures [--threads 2] [--layers 28] [-o docs/data/executorch.json]

Size is compared with what the weights alone need, memory with what a plan predicts, decoding with transformers' model
of these shapes in bfloat16 and with the same program on an 8-bit cache. What is timed is timed in turns in one process,
the best of each beside the median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from edgekit_executorch.export import lower
from edgekit_executorch.inspection import read_contents
from edgekit_executorch.layout import PROGRAM
from edgekit_executorch.offers import offers
from edgekit_executorch.quiet import quiet_output
from edgekit_executorch.versions import versions

from edgekit.common.files import write_file
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Estimate, MemoryFacts, Plan, Quality, Speed
from edgekit.contracts.recipe import named_recipe, weight_bytes
from edgekit.device.load import load_profile
from edgekit.planner.memory import predict
from edgekit.quant.random_weights import random_weights

HALF_BILLION: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
CONTEXT, PROMPT, STEPS = 1024, 256, 24


def half_billion(folder: Path, layers: int) -> NeutralWeights:
    """Random weights, with fewer layers where somebody has no time."""
    config = HALF_BILLION | {"num_hidden_layers": layers}
    return random_weights(folder, config, named_recipe("s4-g64"), "half-billion")


def plan_of(weights: NeutralWeights, threads: int, kv_bits: int) -> Plan:
    nothing = Estimate(mapped_weights_bytes=0, private_weights_bytes=0, kv_bytes=0, activation_bytes=0, runtime_bytes=0)
    return Plan(
        model=weights.model, model_source="random", model_sha256="0" * 64, device="this", device_sha256="0" * 64,
        os_version="0", target="executorch", backend="xnnpack", recipe=weights.recipe, context=CONTEXT, sequences=1,
        chunk_tokens=PROMPT, cache=KVEvictionPolicy(), storage=KVCacheConfig(capacity_tokens=CONTEXT, kv_bits=kv_bits),
        threads=threads, estimate=nothing,
        memory=MemoryFacts(mapped_share=0.0, private_share=1.0, runtime_bytes=0, source="none"),
        budget_bytes=0, budget_why="none",
        speed=Speed(prefill_tokens_per_s=None, decode_tokens_per_s=1.0, first_token_s=None, basis="none"),
        quality=Quality(kl=0.0, same_top=1.0, basis="prior", source="none"),
    )  # fmt: skip


def anonymous_bytes() -> int:
    fields = Path("/proc/self/status").read_text().split("\n")
    return int(next(line for line in fields if line.startswith("RssAnon")).split()[1]) << 10


def memory(folder: Path) -> None:
    """Run in a process of its own: private memory before a program is opened, after, and after use."""
    from edgekit_executorch.engine import ExecutorchEngine
    from edgekit_executorch.operators import register_for_running

    plan = Plan.model_validate_json((folder / "plan.json").read_text())
    register_for_running()
    before = anonymous_bytes()
    engine = ExecutorchEngine(plan, folder)
    opened = anonymous_bytes()
    state, random = engine.start(plan.storage), np.random.default_rng(0)
    for _ in range(CONTEXT // PROMPT):
        engine.forward([Chunk(state, random.integers(0, engine.abilities.vocabulary, PROMPT).tolist(), 1)])
    print(json.dumps({"opened_bytes": opened - before, "used_bytes": anonymous_bytes() - before}))


def timed(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of each, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: {"best_s": min(found), "median_s": statistics.median(found)} for name, found in seconds.items()}


def speed(weights: NeutralWeights, plans: dict[str, tuple[Plan, Path]]) -> dict[str, Any]:
    """Decoding, verifying four tokens and prefill: the programs, and transformers' own model at bfloat16."""
    import torch
    from edgekit_executorch.engine import ExecutorchEngine
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(next(iter(plans.values()))[0].threads)
    engines = {name: ExecutorchEngine(plan, files) for name, (plan, files) in plans.items()}
    layers = {"num_hidden_layers": len(weights.model.layers)}
    config = LlamaConfig(**{key: value for key, value in (HALF_BILLION | layers).items() if key != "model_type"})
    eager = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    cache = DynamicCache()
    states = {name: engine.start(plans[name][0].storage) for name, engine in engines.items()}
    tokens = np.random.default_rng(1).integers(0, weights.model.vocab_size, PROMPT).tolist()

    def program(name: str, count: int, at: int) -> Callable[[], object]:
        engine, state = engines[name], states[name]

        def call() -> None:
            state.rewind(max(0, state.length - at))
            engine.forward([Chunk(state, tokens[:count], 1)])

        return call

    def torch_eager(count: int, at: int) -> Callable[[], object]:
        def call() -> None:
            with torch.inference_mode():
                if cache.get_seq_length() > at:
                    cache.crop(at - cache.get_seq_length())
                eager(torch.tensor([tokens[:count]]), past_key_values=cache, use_cache=True, logits_to_keep=1)

        return call

    found: dict[str, Any] = {}
    with quiet_output():
        for engine in engines:
            program(engine, PROMPT, 0)()
        torch_eager(PROMPT, 0)()
        for name, count, at in (("prefill", PROMPT, 0), ("decode", 1, PROMPT), ("verify_4", 4, PROMPT)):
            calls = {engine: program(engine, count, at) for engine in engines}
            calls["torch_bfloat16"] = torch_eager(count, at)
            found[name] = timed(calls, 3 if name == "prefill" else STEPS)
            found[name]["tokens"] = count
    for opened in engines.values():
        opened.close()
    return found


def lowered(weights: NeutralWeights, plan: Plan, files: Path) -> dict[str, Any]:
    """A program, with the time and memory of making and running it."""
    files.mkdir()
    (files / "plan.json").write_text(plan.to_json())
    start, processor = time.perf_counter(), time.process_time()
    with quiet_output():
        lower(plan, weights, files / PROGRAM, lambda done, total, what: print(f"{done:.0f}/{total:.0f} {what}"))
    lowering = {"wall_s": time.perf_counter() - start, "processor_s": time.process_time() - processor}
    contents, stored = read_contents(files / PROGRAM), weight_bytes(weights.model, weights.recipe)
    measured = json.loads(
        subprocess.run(
            [sys.executable, "-m", "examples.benchmarks.executorch_figures", "--memory", str(files)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    offered = next(
        offer for offer in offers(weights.model, load_profile("laptop-x86-8gb")) if offer.recipe == weights.recipe
    )
    estimate = predict(
        weights.model, weights.recipe, offered.memory,
        held_tokens=CONTEXT, sequences=1, kv_bits=plan.storage.kv_bits, chunk_tokens=PROMPT,
    )  # fmt: skip
    predicted = estimate.private_bytes - estimate.runtime_bytes
    return {
        "lowering": lowering,
        "size": {"program_bytes": contents.bytes, "weight_bytes": stored, "ratio": contents.bytes / stored},
        "memory": {
            "predicted_bytes": predicted,
            "arena_bytes": contents.arena_bytes,
            "cache_bytes": estimate.kv_bytes,
            **measured,
            "ratio": predicted / measured["used_bytes"],
        },
    }


def figures(folder: Path, layers: int, threads: int) -> dict[str, Any]:
    weights = half_billion(folder / "weights", layers)
    wide, narrow = (plan_of(weights, threads, bits) for bits in (32, 8))
    return {
        "model": {"parameters": weights.model.parameters, "layers": layers, "recipe": weights.recipe.name},
        "machine": {"cpu": platform.machine(), "threads": threads, **versions()},
        **lowered(weights, wide, folder / "wide"),
        "narrow": lowered(weights, narrow, folder / "narrow"),
        "speed": speed(weights, {"program": (wide, folder / "wide"), "program_8_bits": (narrow, folder / "narrow")}),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=HALF_BILLION["num_hidden_layers"])
    parser.add_argument("--memory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--out", type=Path)
    asked = parser.parse_args()
    if asked.memory:
        memory(asked.memory)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = figures(Path(folder), asked.layers, asked.threads)
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if asked.out:
        write_file(asked.out, text.encode())


if __name__ == "__main__":
    main()
