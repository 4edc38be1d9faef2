"""The llamacpp engine beside llama.cpp's own benchmark loop on the same file, in turns in one process.

    python -m examples.benchmarks.llamacpp_speed ARTIFACT [--prompt 512] [--decoded 64] [--turns 9] [--threads 2]
    python -m examples.benchmarks.llamacpp_speed --random DIR   # a model of 1.2 billion random weights, built there

The loop is that of llama-bench, over the C API with the library's default context: a prompt in one call, then single
tokens, whose logits nobody reads. Ours is the engine that the runtime steps, logits copied out. Medians; a ratio above
1 says that ours takes longer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from edgekit_llamacpp import LlamaCppTarget, library, structs
from edgekit_llamacpp.engine import LlamaCppEngine
from edgekit_llamacpp.layout import WEIGHTS

from edgekit.artifact.artifact import open_artifact
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.plan import Estimate, MemoryFacts, Plan, Quality, Speed
from edgekit.contracts.recipe import named_recipe
from edgekit.quant.random_weights import random_weights
from examples.benchmarks.random_models import LLAMA_1B


class OwnLoop:
    """The loop of llama-bench: its calls, one context, no sampling."""

    def __init__(self, path: Path, context: int, threads: int) -> None:
        self._library = library.load()
        model = self._library.llama_model_default_params()
        model.n_gpu_layers = 0
        self._model = self._library.llama_model_load_from_file(bytes(path), model)
        params = self._library.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = context, threads, threads
        self._context = self._library.llama_init_from_model(self._model, params)
        self._memory = self._library.llama_get_memory(self._context)
        functions: Any = self._library
        self._one, self._wait = functions.llama_batch_get_one, functions.llama_synchronize
        self._one.restype, self._one.argtypes = structs.TokenBatch, [ctypes.POINTER(ctypes.c_int32), ctypes.c_int32]
        self._wait.restype, self._wait.argtypes = None, [ctypes.c_void_p]

    def clear(self) -> None:
        self._library.llama_memory_clear(self._memory, True)

    def step(self, tokens: list[int]) -> None:
        array = np.array(tokens, np.int32)
        batch = self._one(array.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)), len(tokens))
        assert self._library.llama_decode(self._context, batch) == 0
        self._wait(self._context)


class OurLoop:
    """The engine of the artifact, as the runtime steps it."""

    def __init__(self, plan: Plan, files: Path) -> None:
        self._engine, self._plan = LlamaCppEngine(plan, files), plan
        self._state = self._engine.start(plan.storage)

    def clear(self) -> None:
        self._state.close()
        self._state = self._engine.start(self._plan.storage)

    def step(self, tokens: list[int]) -> None:
        self._engine.forward([Chunk(self._state, tokens, 1)])


def compare(plan: Plan, files: Path, prompt: int, decoded: int, turns: int) -> dict[str, Any]:
    """Return the medians of both loops in seconds a token, and the ratios of ours to llama.cpp's own."""
    loops: dict[str, OwnLoop | OurLoop] = {
        "own": OwnLoop(files / WEIGHTS, prompt + decoded, plan.threads),
        "ours": OurLoop(plan, files),
    }
    tokens = [(7 + 2_654_435_761 * place) % plan.model.vocab_size for place in range(prompt)]
    times: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in loops}
    for turn in range(turns + 1):
        for name, loop in list(loops.items())[:: 1 if turn % 2 else -1]:
            loop.clear()
            prefill = _seconds(lambda loop=loop: loop.step(tokens))  # type: ignore[misc]
            loop.clear()
            decode = _seconds(lambda loop=loop: [loop.step([token]) for token in tokens[:decoded]])  # type: ignore[misc]
            if turn:  # the first warms up
                times[name]["prefill"].append(prefill / prompt)
                times[name]["decode"].append(decode / decoded)
    medians = {name: {what: statistics.median(each) for what, each in kinds.items()} for name, kinds in times.items()}
    ratios = {
        what: statistics.median(a / b for a, b in zip(times["ours"][what], times["own"][what], strict=True))
        for what in ("prefill", "decode")
    }
    return {"threads": plan.threads, "seconds_a_token": medians, "ours_over_own": ratios}


def random_artifact(folder: Path) -> tuple[Plan, Path]:
    """Export a model of 1.2 billion random weights in four bits, or find it."""
    recipe, files = named_recipe("s4-g32"), folder / "files"
    weights = random_weights(folder / "weights", LLAMA_1B, recipe, "1.2B")
    nothing = Estimate(mapped_weights_bytes=0, private_weights_bytes=0, kv_bytes=0, activation_bytes=0, runtime_bytes=0)
    plan = Plan(
        model=weights.model, model_source="random", model_sha256="0" * 64, device="this", device_sha256="0" * 64,
        os_version="0", target="llamacpp", backend="cpu", recipe=weights.recipe, context=1024, sequences=1,
        chunk_tokens=512, cache=KVEvictionPolicy(), storage=KVCacheConfig(capacity_tokens=1024, kv_bits=16), threads=2,
        estimate=nothing, memory=MemoryFacts(mapped_share=1, private_share=1, runtime_bytes=0, source="none"),
        budget_bytes=1 << 40, budget_why="figures",
        speed=Speed(prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0, first_token_s=1.0, basis="none"),
        quality=Quality(kl=0.0, same_top=1.0, basis="prior", source="none"),
    )  # fmt: skip
    files.mkdir()
    LlamaCppTarget().export(plan, weights, files, lambda done, total, what: None)
    (folder / "plan.json").write_text(plan.to_json())
    return plan, files


def _seconds(act: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument("--random", type=Path)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decoded", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    if asked.random and (asked.random / "plan.json").exists():
        plan, files = Plan.model_validate_json((asked.random / "plan.json").read_bytes()), asked.random / "files"
    elif asked.random:
        plan, files = random_artifact(asked.random)
    else:
        plan, files = open_artifact(asked.artifact).plan, asked.artifact
    plan = plan.model_copy(update={"threads": asked.threads, "chunk_tokens": asked.prompt, "sequences": 1})
    print(json.dumps(compare(plan, files, asked.prompt, asked.decoded, asked.turns), indent=1))


if __name__ == "__main__":
    main()
