"""Measures one engine: exports and opens a random model, and runs a round for each message of `PipedProcess`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

from edgekit import plugins
from edgekit.contracts.engine import Chunk, Engine
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Estimate, Plan, Quality, Speed
from edgekit.contracts.recipe import named_recipe
from edgekit.contracts.target import Offer
from edgekit.device.engine_speeds import CONTEXT, DECODED, PROMPT, RECIPE, EngineSpeed
from edgekit.device.load import load_profile


def main(target_name: str, weights_folder: Path, out: Path, threads: int) -> None:
    """Run a round for every message on stdin, and answer with its times."""
    weights = NeutralWeights.open(weights_folder)
    target = plugins.load_target(target_name)
    device = load_profile("this")
    offer = target.offer(weights.model, device, device.targets[target_name][0], named_recipe(RECIPE))
    out.mkdir()
    plan = _plan(weights, offer, threads)
    target.export(plan, weights, out, lambda done, total, what: None)
    engine = target.open(plan, out)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(size := source.read(4)) == 4:
        source.read(int.from_bytes(size, "big"))
        data = json.dumps(run_round(engine, plan)._asdict()).encode()
        sink.write(len(data).to_bytes(4, "big") + data)
        sink.flush()
    engine.close()


def run_round(engine: Engine, plan: Plan) -> EngineSpeed:
    """Time a prompt, and the decode steps after it, of which the median counts."""
    state = engine.start(plan.storage)
    began = perf_counter()
    engine.forward([Chunk(state, [(7 + 31 * index) % plan.model.vocab_size for index in range(PROMPT)], 1)])
    prompt_s, steps = perf_counter() - began, []
    for token in range(DECODED):
        began = perf_counter()
        engine.forward([Chunk(state, [token], 1)])
        steps.append(perf_counter() - began)
    state.close()
    return EngineSpeed(prompt_s, median(steps))


def _plan(weights: NeutralWeights, offer: Offer, threads: int) -> Plan:
    """Make a plan for the engine, with placeholders for the predictions, which no engine reads."""
    nothing = Estimate(mapped_weights_bytes=0, private_weights_bytes=0, kv_bytes=0, activation_bytes=0, runtime_bytes=0)
    return Plan(
        model=weights.model, model_source="random", model_sha256="0" * 64, device="this", device_sha256="0" * 64,
        os_version="0", target=offer.target, backend=offer.backend, recipe=weights.recipe, context=CONTEXT,
        sequences=1, chunk_tokens=PROMPT, cache=KVEvictionPolicy(), threads=threads,
        storage=KVCacheConfig(capacity_tokens=CONTEXT, kv_bits=offer.capabilities.kv_bits[0]), estimate=nothing,
        memory=offer.memory, budget_bytes=0, budget_why="a measurement",
        speed=Speed(prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0, first_token_s=1.0, basis="a measurement"),
        quality=Quality(kl=0.0, same_top=1.0, basis="prior", source="a measurement"),
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
