"""Figures of the native runner beside the desktop engine on this machine: speed, memory, loading, and equal tokens.

    python -m examples.benchmarks.runner_figures [--rounds 5] [--layers 28] [-o docs/data/runner.json]

The demo is asked the same question both ways, in turns; then a random model of half a billion parameters (`--layers 0`:
not) writes after a prompt both ways. `executorch` is the runner with ExecuTorch's own attention, which loads libtorch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from edgekit_executorch.export import lower
from edgekit_executorch.layout import PROGRAM
from edgekit_executorch.quiet import quiet_output

from edgekit.apps.bench.measurement import Measurement
from edgekit.apps.bench.statistics import METRICS
from edgekit.apps.bench.workload import read_workload
from edgekit.apps.lab.runner_job import job_of
from edgekit.artifact.artifact import open_artifact
from edgekit.common.files import write_file
from edgekit.contracts.engine import Chunk
from edgekit.contracts.plan import Plan
from examples.benchmarks.executorch_figures import PROMPT, half_billion, plan_of

WORKLOAD, TEXTS, WRITTEN = "quick", ("quick", "chat", "code", "summarise"), 400
STEPS = 64


def wheel() -> Path:
    found = find_spec("executorch")
    assert found is not None and found.submodule_search_locations
    return Path(next(iter(found.submodule_search_locations)))


def executorchs_operators() -> str:
    """ExecuTorch's own attention, in the library that it has for Python."""
    library = Path(sysconfig.get_config_var("LIBDIR")) / sysconfig.get_config_var("INSTSONAME")
    return f"{library}:{wheel() / 'extension/llm/custom_ops/libcustom_ops_aot_lib.so'}"


def built(folder: Path) -> Path:
    source = Path(__file__).parents[1] / "runner"
    for command in (["-S", source, "-B", folder, f"-DCMAKE_PREFIX_PATH={wheel()}"], ["--build", folder]):
        subprocess.run(["cmake", *map(str, command)], check=True, capture_output=True)
    return folder / "edgekit_runner"


def answer(command: Sequence[object], operators: str = "") -> str:
    environment = {**os.environ, "EDGEKIT_OPERATORS": operators}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert done.returncode in (0, 4), done.stderr[-2000:]
    return done.stdout


def demo(runner: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Ask one question in turns; count every trial, and report how many were disturbed."""
    artifact, question = folder / "demo.edgekit", folder / "question.json"
    exporting = [
        "export",
        "demo",
        "--effort",
        "quick",
        "--device",
        "pixel-9",
        "--target",
        "executorch",
        "--recipe",
        "s4-g64",
    ]
    subprocess.run([sys.executable, "-m", "edgekit", *exporting, "-o", str(artifact)], check=True)
    question.write_text(job_of(artifact, read_workload(WORKLOAD), loads=2).model_dump_json())
    bench = [sys.executable, "-m", "edgekit", "bench", artifact, "-w", WORKLOAD, "--loads", 2, "--json"]
    measure = [runner, "measure", artifact, question]
    ways = {"desktop": (bench, ""), "runner": (measure, ""), "executorch": (measure, executorchs_operators())}
    found: dict[str, list[Measurement]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (command, operators) in ways.items():
            found[name].append(Measurement.model_validate_json(answer(command, operators)))
    return {name: told(measured) for name, measured in found.items()} | {"tokens": tokens(runner, artifact)}


def told(found: list[Measurement]) -> dict[str, Any]:
    trials = [trial for one in found for case in one.cases for trial in case.trials]
    speeds = {name: [METRICS[name](trial) or 0.0 for trial in trials]
              for name in ("decode_tokens_per_s", "prefill_tokens_per_s")}  # fmt: skip
    return {
        **{f"{name}_best": max(values) for name, values in speeds.items()},
        **{f"{name}_median": statistics.median(values) for name, values in speeds.items()},
        "trials": len(trials),
        "disturbed": sum(trial.invalid is not None for trial in trials),
        "load_s": statistics.median(seconds for one in found for seconds in one.load_s),
        "peak_bytes": max(one.memory.peak_bytes or 0 for one in found),
        "anonymous_bytes": max(one.memory.anonymous_bytes or 0 for one in found),
    }


def tokens(runner: Path, artifact: Path) -> dict[str, dict[str, int]]:
    """Count the first greedy tokens that equal the desktop's, token by token and in chunks."""
    found: dict[str, dict[str, int]] = {}
    for exact in (True, False):
        plan = open_artifact(artifact).plan
        for name in TEXTS:
            asked = job_of(artifact, read_workload(name))
            prompt = asked.cases[0].requests[0].tokens
            count = min(WRITTEN, plan.storage.capacity_tokens - len(prompt))
            chunk = 1 if exact else asked.chunk_tokens
            desktop = json.loads(
                answer(
                    [
                        sys.executable,
                        "-m",
                        "examples.benchmarks.runner_figures",
                        "--desktop",
                        artifact,
                        chunk,
                        count,
                        *prompt,
                    ]
                )
            )
            equal = {"of": count}
            for way, operators in (("runner", ""), ("executorch", executorchs_operators())):
                command = [runner, "generate", artifact / PROGRAM, 2, chunk, count, *prompt]
                said = [int(word) for word in answer(command, operators).split()]
                pairs = enumerate(zip(said, desktop["tokens"], strict=True))
                equal[way] = next((place for place, (one, other) in pairs if one != other), count)
            found[f"{name}, {'token by token' if exact else 'in chunks'}"] = equal
    return found


def large_model(runner: Path, folder: Path, layers: int, rounds: int) -> dict[str, Any]:
    """Prefill and decoding of a model whose weights no cache holds, in turns."""
    weights = half_billion(folder / "weights", layers)
    plan, files = plan_of(weights, 2, 32), folder / "half-billion"
    files.mkdir()
    (files / "plan.json").write_text(plan.to_json())
    with quiet_output():
        lower(plan, weights, files / PROGRAM, lambda done, total, what: None)
    prompt = np.random.default_rng(1).integers(0, weights.model.vocab_size, PROMPT).tolist()
    found: dict[str, list[dict[str, float]]] = {"desktop": [], "runner": [], "executorch": []}
    for _ in range(rounds):
        found["desktop"].append(
            json.loads(
                answer(
                    [
                        sys.executable,
                        "-m",
                        "examples.benchmarks.runner_figures",
                        "--desktop",
                        files,
                        PROMPT,
                        STEPS,
                        *prompt,
                    ]
                )
            )
        )
        for way, operators in (("runner", ""), ("executorch", executorchs_operators())):
            command = [runner, "generate", files / PROGRAM, 2, PROMPT, STEPS, *prompt]
            environment = {**os.environ, "EDGEKIT_OPERATORS": operators}
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True, env=environment)
            words = done.stderr.strip().splitlines()[-1].replace(",", "").split()  # prefill S s decode N tokens/s
            found[way].append({"prefill_s": float(words[1]), "decode_tokens_per_s": float(words[4])})
    return {
        "parameters": weights.model.parameters, "layers": layers, "prompt": PROMPT, "written": STEPS,
        **{way: {"decode_tokens_per_s_best": max(one["decode_tokens_per_s"] for one in runs),
                 "decode_tokens_per_s_median": statistics.median(one["decode_tokens_per_s"] for one in runs),
                 "prefill_s_best": min(one["prefill_s"] for one in runs),
                 "prefill_s_median": statistics.median(one["prefill_s"] for one in runs)}
           for way, runs in found.items()},
    }  # fmt: skip


def desktop(words: Sequence[str]) -> None:
    """Write after a prompt with the desktop engine, in a process of its own."""
    from edgekit_executorch.engine import ExecutorchEngine

    files, chunk, count = Path(words[0]), int(words[1]), int(words[2])
    plain = files / "plan.json"
    plan = Plan.model_validate_json(plain.read_text()) if plain.exists() else open_artifact(files).plan
    with quiet_output():
        engine = ExecutorchEngine(plan, files)
    state, fed, written, at = engine.start(plan.storage), [int(word) for word in words[3:]], list[int](), list[float]()
    began = perf_counter()
    while len(written) < count:
        for start in range(0, len(fed), chunk):
            rows = engine.forward([Chunk(state, fed[start : start + chunk], 1)])[0]
        written.append(int(rows[-1].argmax()))
        at.append(perf_counter())
        fed = written[-1:]
    engine.close()
    speed = (count - 1) / (at[-1] - at[0])
    print(json.dumps({"tokens": written, "prefill_s": at[0] - began, "decode_tokens_per_s": speed}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--desktop", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--out", type=Path)
    asked = parser.parse_args()
    if asked.desktop:
        desktop(asked.desktop)
        return
    with tempfile.TemporaryDirectory() as name:
        folder, load = Path(name), os.getloadavg()[0]
        runner = built(folder / "build")
        found: dict[str, Any] = {
            "runner": answer([runner, "version"]).strip(),
            "load_average": {"before": load},
            "demo": demo(runner, folder, asked.rounds),
        }
        if asked.layers:
            found["half_billion"] = large_model(runner, folder, asked.layers, asked.rounds)
        found["load_average"]["after"] = os.getloadavg()[0]
    text = json.dumps(found, indent=1) + "\n"
    print(text)
    if asked.out:
        write_file(asked.out, text.encode())


if __name__ == "__main__":
    main()
