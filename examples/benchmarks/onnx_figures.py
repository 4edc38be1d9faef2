"""Figures of the onnx target on this machine, at the shapes of Llama 3.2 1B with random weights.

    python -m examples.benchmarks.onnx_figures [--recipe s4-g128] [--threads 2] [--keep DIR]

Everything that is compared is measured in turns in one run, and medians are given, because other programs come and go.
The read bandwidth is measured between the steps, by as many threads as decode.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from edgekit_onnx import OnnxTarget

from edgekit.artifact.artifact import seal
from edgekit.common.files import home
from edgekit.contracts.engine import Chunk
from edgekit.contracts.kv_policy import KVCacheConfig, KVEvictionPolicy
from edgekit.contracts.neutral import NeutralWeights
from edgekit.contracts.plan import Estimate, MemoryFacts, Plan, Quality, Speed
from edgekit.contracts.recipe import named_recipe
from edgekit.quant.random_weights import random_weights
from examples.benchmarks.process_memory import HighWater, status_bytes
from examples.benchmarks.random_models import LLAMA_1B

PROMPT, STEPS, CONTEXT = 512, 96, 4096


def plan_of(weights: NeutralWeights, threads: int) -> Plan:
    return Plan(
        model=weights.model, model_source="random", model_sha256="0" * 64, device="this", device_sha256="0" * 64,
        os_version="0", target="onnx", backend="cpu", recipe=weights.recipe, context=CONTEXT, sequences=2,
        chunk_tokens=PROMPT, cache=KVEvictionPolicy(), storage=KVCacheConfig(capacity_tokens=CONTEXT, kv_bits=32),
        threads=threads,
        estimate=Estimate(
            mapped_weights_bytes=0, private_weights_bytes=0, kv_bytes=0, activation_bytes=0, runtime_bytes=0
        ),
        memory=MemoryFacts(mapped_share=1.0, private_share=0.0, runtime_bytes=0, source="none"),
        budget_bytes=0, budget_why="figures", speed=Speed(
            prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0, first_token_s=1.0, basis="none"
        ),
        quality=Quality(kl=0.0, same_top=1.0, basis="prior", source="none"),
    )  # fmt: skip


def exporting(weights: NeutralWeights, folder: Path, threads: int) -> dict[str, float]:
    """Write and seal the artifact; seconds and private memory of writing."""
    plan = plan_of(weights, threads)
    staging = folder / "staging"
    staging.mkdir()
    before, water = status_bytes("RssAnon"), HighWater()
    water.start()
    begun = time.perf_counter()
    OnnxTarget().export(plan, weights, staging, lambda done, total, what: None)
    seconds = time.perf_counter() - begun
    water.is_over.set()
    water.join()
    data = (staging / "weights.bin").stat().st_size
    seal(staging, folder / "artifact", plan, weights_sha256=weights.sha256, tools={}, self_check="none: figures")
    return {"export_s": seconds, "export_private_mb": (water.most - before) / 1e6, "weights_mb": data / 1e6}


def opening(folder: Path) -> dict[str, float]:
    """Measure in a process of its own: seconds to open, private and mapped memory after a prompt and some steps."""
    plan = Plan.model_validate_json(json.dumps(json.loads((folder / "manifest.json").read_text())["plan"]))
    import onnxruntime  # noqa: F401 — importing the library is not loading the model

    begun = time.perf_counter()
    engine = OnnxTarget().open(plan, folder)
    state = engine.start(plan.storage)  # which is when the layers are opened
    seconds = time.perf_counter() - begun
    engine.forward([Chunk(state, list(range(1000, 1000 + PROMPT)), 1)])
    for token in range(16):
        engine.forward([Chunk(state, [token], 1)])
    kv = engine.state_bytes(plan.storage) * state.length // CONTEXT
    return {
        "load_s": seconds,
        "private_mb": status_bytes("RssAnon") / 1e6,
        "of_which_kv_mb": kv / 1e6,
        "mapped_mb": status_bytes("RssFile") / 1e6,
    }


def drop_cached_pages(folders: Sequence[Path]) -> None:
    """Write these files to the disk, then drop them from the system's page cache."""
    os.sync()
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bandwidth_reader(threads: int) -> Callable[[], float]:
    """Reads 512 MB with that many threads; bytes a second."""
    arrays = [np.ones((256 << 20) // 8 * 2 // threads, np.float64) for _ in range(threads)]

    def read() -> float:
        workers = [threading.Thread(target=array.sum) for array in arrays]
        begun = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(array.nbytes for array in arrays) / (time.perf_counter() - begun)

    return read


def speeds(folder: Path, threads: int, read_bytes_per_token: int) -> dict[str, float]:
    """Prefill and decode in default and in exact mode, verifying several rows, and the bandwidth, all in turns."""
    plan = Plan.model_validate_json(json.dumps(json.loads((folder / "manifest.json").read_text())["plan"]))
    engines = {name: OnnxTarget().open(plan, folder, exact=name == "exact") for name in ("default", "exact")}
    prompt = [int(token) for token in np.random.default_rng(1).integers(0, 128_000, PROMPT)]
    prefill: dict[str, list[float]] = {name: [] for name in engines}
    states = {}
    for turn in range(3):
        for name, engine in engines.items():
            state = engine.start(plan.storage)
            begun = time.perf_counter()
            engine.forward([Chunk(state, prompt, 1)])
            prefill[name].append(PROMPT / (time.perf_counter() - begun))
            if turn == 2:
                states[name] = state
            else:
                state.close()
    read, decode, bandwidth = bandwidth_reader(threads), {name: [0.0] * 0 for name in engines}, []
    verify: dict[int, list[float]] = {count: [] for count in (2, 4, 5, 8, 16)}
    for step in range(STEPS):
        for name, engine in engines.items():
            begun = time.perf_counter()
            engine.forward([Chunk(states[name], [step], 1)])
            decode[name].append(time.perf_counter() - begun)
        if step % 4 == 0:
            bandwidth.append(read())
            for count, times in verify.items():
                begun = time.perf_counter()
                engines["default"].forward([Chunk(states["default"], prompt[:count], count)])
                times.append(time.perf_counter() - begun)
                states["default"].rewind(count)
    steps = {name: statistics.median(times[8:]) for name, times in decode.items()}
    found = {
        "prefill_tokens_per_s": statistics.median(prefill["default"]),
        "decode_tokens_per_s": 1 / steps["default"],
        "best_decode_tokens_per_s": 1 / min(decode["default"]),
        "read_gb_per_s": statistics.median(bandwidth) / 1e9,
        "share_of_bandwidth": read_bytes_per_token / steps["default"] / statistics.median(bandwidth),
        "exact_over_default_decode": steps["exact"] / steps["default"],
        "exact_over_default_prefill": statistics.median(prefill["default"]) / statistics.median(prefill["exact"]),
    }
    found |= {f"verify_{count}_over_1": statistics.median(times) / steps["default"] for count, times in verify.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", default="s4-g128", help="a built-in recipe")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--keep", type=Path, help="a folder for weights and artifact; otherwise a temporary one")
    parser.add_argument("--output", "-o", type=Path, help="write the figures here as JSON too")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        print(json.dumps(opening(arguments.open)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        weights = random_weights(folder / "neutral", LLAMA_1B, named_recipe(arguments.recipe), "llama-1b-shapes")
        figures: dict[str, float] = exporting(weights, folder, arguments.threads)
        # A tied embedding is read once a token, as the head.
        read = int(figures["weights_mb"] * 1e6)
        command = [sys.executable, "-m", "examples.benchmarks.onnx_figures", "--open", str(folder / "artifact")]
        for name, environment, times in (
            ("first", {}, 1),
            ("from_disk", {}, 1),
            ("then", {}, 5),
            ("copied", {"EDGEKIT_PACKED": "off"}, 1),
        ):
            if name == "from_disk":
                drop_cached_pages([home() / "packed", folder / "artifact"])
            openings = [
                json.loads(
                    subprocess.run(
                        command, env={**os.environ, **environment}, capture_output=True, check=True, text=True
                    ).stdout
                )
                for _ in range(times)
            ]
            figures |= {f"{name}_{key}": statistics.median(each[key] for each in openings) for key in openings[0]}
        figures |= speeds(folder / "artifact", arguments.threads, read)
    load = os.getloadavg()
    print(f"recipe {arguments.recipe}, {arguments.threads} threads, prompt {PROMPT}; load average {load[0]:.1f}")
    for name, value in figures.items():
        print(f"{name:<34} {value:>12.3f}")
    if arguments.output:
        arguments.output.write_text(json.dumps({"load_average": load[0], **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
