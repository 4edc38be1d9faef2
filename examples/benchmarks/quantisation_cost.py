"""Measures what quantising costs: rounding a random 1.2 B model, GPTQ of a random 0.4 B one. Prints a table.

    python -m examples.benchmarks.quantisation_cost [--threads 2] [--cap 1500000000]

Processor seconds are of all threads together, so they hold on a machine that does other things too. GPTQ is run on two
amounts of text: what does not depend on the text, and what each token adds, follow from the two. Rounding is run again
under a limit on private memory (RLIMIT_DATA).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from edgekit.formats.safetensors import INDEX
from edgekit.formats.safetensors_writer import TensorWriter
from edgekit.model.families import model_from_config

assert sys.platform != "win32"

SHAPES: dict[str, dict[str, Any]] = {
    "1.2B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    "0.4B": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000},
}  # fmt: skip
COMMON = {
    "model_type": "llama", "tie_word_embeddings": True, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_random_model(folder: Path, config: dict[str, Any]) -> int:
    """Write a bfloat16 model in two shards, piece by piece; return the number of its parameters."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = model_from_config(config, folder.name, "config.json")
    tensors = list(model.tensors())
    generator = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    for number, half in enumerate((tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]), 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        with TensorWriter(folder / name, {tensor.name: ("BF16", tensor.shape) for tensor in half}) as writer:
            for tensor in half:
                step = max(1, (1 << 22) // (tensor.size // tensor.shape[0]))
                for first in range(0, tensor.shape[0], step):
                    rows = (min(step, tensor.shape[0] - first), *tensor.shape[1:])
                    values = generator.standard_normal(rows, dtype=np.float32) * np.float32(0.02)
                    writer.write(tensor.name, (values.view(np.uint32) >> 16).astype(np.uint16), first)
                weight_map[tensor.name] = name
            writer.seal()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return model.parameters


def quantise(model: Path, store: Path, sequences: int, length: int, cap: int) -> None:
    """Quantise in a child process, and print time and memory."""
    import resource
    import threading
    import time

    import torch

    from edgekit.common.content_store import ContentStore
    from edgekit.contracts.recipe import named_recipe
    from edgekit.quant.calibration import read_calibration
    from edgekit.quant.pipeline import neutral_weights

    if cap:
        resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
    peak = 0

    def watch() -> None:
        nonlocal peak
        while True:
            status = Path("/proc/self/status").read_text().splitlines()
            peak = max(peak, next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")))
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    calibration = None
    if sequences:
        tokens = np.random.default_rng(1).integers(3, 32000, sequences * length)
        np.save(store / "tokens.npy", tokens)
        calibration = read_calibration(store / "tokens.npy", model, sequences=sequences, length=length)
    wall, processor = time.perf_counter(), time.process_time()
    weights = neutral_weights(model, named_recipe("s4-g32"), calibration=calibration, store=ContentStore(store))
    seconds = time.perf_counter() - wall
    print(
        json.dumps(
            {
                "method": weights.manifest.method,
                "tokens": sequences * length,
                "parameters": weights.model.parameters,
                "seconds": round(seconds, 1),
                "cpu_seconds": round(time.process_time() - processor, 1),
                "million_parameters_per_s": round(weights.model.parameters / seconds / 1e6, 1),
                "peak_private_bytes": peak,
                "cap_bytes": cap or None,
                "sha256": weights.sha256,
            }
        )
    )


def measured(model: Path, threads: int, sequences: int = 0, length: int = 0, cap: int = 0) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=model.parent) as store:
        done = subprocess.run(
            [sys.executable, __file__, "--child", str(model), store, str(sequences), str(length), str(cap)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "EDGEKIT_HOME": store},
        )
    found: dict[str, Any] = json.loads(done.stdout)
    found |= {"threads": threads, "load_average": round(os.getloadavg()[0], 1)}
    print(json.dumps(found), flush=True)
    return found


def table(found: dict[str, Any]) -> str:
    """The table of what was measured, and what a billion parameters take."""
    lines = [
        "| method | model | tokens of text | threads | seconds | processor seconds | private memory, peak | load |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (*found["rtn"], *found["gptq"]):
        model = f"random, {row['parameters'] / 1e9:.2f} B" + (", 2.5 GB of shards" if row["method"] == "rtn" else "")
        limit = f", under a limit of {row['cap_bytes'] / 1e9:g} GB" if row["cap_bytes"] else ""
        text = f"{row['tokens']:,}" if row["tokens"] else ""
        lines.append(
            f"| {row['method']}{limit} | {model} | {text} | {row['threads']} | {row['seconds']:.0f} | "
            f"{row['cpu_seconds']:.0f} | {row['peak_private_bytes'] / 1e6:.0f} MB | {row['load_average']:g} |"
        )
    plain, cost = found["rtn"][0], found["gptq_cpu_seconds_per_billion"]
    speed, by_clock = plain["parameters"] / plain["cpu_seconds"] / 1e6, plain["million_parameters_per_s"]
    said = (
        f"Rounding to nearest takes a processor second for {speed:.0f} M parameters, and did {by_clock:g} M a second\n"
        f"by the clock. GPTQ takes about {cost['without_text']:.0f} processor seconds a billion parameters to choose\n"
        f"integers, and {cost['each_1000_tokens']:.0f} more for each 1,000 tokens of calibration text."
    )
    return "\n".join([*lines, "", said])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cap", type=int, default=1_500_000_000)
    parser.add_argument("--folder", type=Path, help="Where the random models are written; 4 GB are needed.")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        large, small = Path(folder) / "1.2B", Path(folder) / "0.4B"
        write_random_model(large, {**COMMON, **SHAPES["1.2B"]})
        found["rtn"] = [measured(large, options.threads), measured(large, options.threads, cap=options.cap)]
        write_random_model(small, {**COMMON, **SHAPES["0.4B"]})
        found["gptq"] = [measured(small, options.threads, count, 512) for count in (4, 12)]
    few, more = found["gptq"]
    a_token = (more["cpu_seconds"] - few["cpu_seconds"]) / (more["tokens"] - few["tokens"])
    fixed = few["cpu_seconds"] - a_token * few["tokens"]
    billions = few["parameters"] / 1e9
    found["gptq_cpu_seconds_per_billion"] = {
        "without_text": round(fixed / billions, 1),
        "each_1000_tokens": round(a_token * 1000 / billions, 2),
    }
    print(table(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        quantise(Path(sys.argv[2]), Path(sys.argv[3]), *(int(value) for value in sys.argv[4:]))
    else:
        main()
