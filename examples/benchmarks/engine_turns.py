"""Artifacts of one model on several engines, in turns: prefill and decode, quiet and beside one busy process.

    python -m examples.benchmarks.engine_turns NAME=ARTIFACT ... [--spin off,brief,on] [--processes 5] [--quiet-only] \\
        [--model "1.2 B parameters" -o results/engine_turns_intel.json]

Every engine is opened in `--processes` processes of its own, all of the same artifact; processes take turns. A spin
setting other than `brief` is given to the engine as EDGEKIT_SPIN. Times are medians over processes of the least of the
rounds of each; the share of cores that other programs used meanwhile stands beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from edgekit.apps.bench.machine import Machine
from edgekit.artifact.artifact import open_artifact
from edgekit.contracts.engine import Chunk

ROUNDS, DECODED, REST_S = 3, 32, 1.0


def child(folder: Path, prompts: list[int]) -> None:
    """Open an artifact and answer every line with the seconds of each prompt and of a step after it."""
    artifact = open_artifact(folder)
    plan, engine = artifact.plan, artifact.working_target().open(artifact.plan, artifact.folder)
    for line in sys.stdin:
        if line.startswith("rest"):
            before = time.process_time()
            time.sleep(REST_S)
            print(json.dumps({"idle": time.process_time() - before}), flush=True)
            continue
        answer: dict[str, list[float]] = {}
        for prompt in prompts:
            state = engine.start(plan.storage)
            ids = [(7 + 31 * place) % plan.model.vocab_size for place in range(prompt)]
            began = time.perf_counter()
            for start in range(0, prompt, plan.chunk_tokens):
                part = ids[start : start + plan.chunk_tokens]
                engine.forward([Chunk(state, part, int(start + len(part) == prompt))])
            prompt_s, steps = time.perf_counter() - began, []
            for token in range(DECODED):
                began = time.perf_counter()
                int(engine.forward([Chunk(state, [token], 1)])[0].argmax())
                steps.append(time.perf_counter() - began)
            state.close()
            answer[str(prompt)] = [prompt_s, median(steps)]
        print(json.dumps(answer), flush=True)


def start(folder: str, spin: str, prompts: str) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    environment.pop("EDGEKIT_SPIN", None)
    if spin != "brief":
        environment["EDGEKIT_SPIN"] = spin
    words = [sys.executable, "-m", "examples.benchmarks.engine_turns", "--child", folder, "--prompts", prompts]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(process: subprocess.Popen[str], what: str) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(what + "\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def measured(processes: dict[str, list[subprocess.Popen[str]]], prompts: list[str], machine: Machine) -> dict[str, Any]:
    """One phase: every process of every subject in turns, `ROUNDS` times."""
    own = [each.pid for group in processes.values() for each in group]
    best: dict[str, list[dict[str, list[float]]]] = {name: [{} for _ in group] for name, group in processes.items()}
    before = machine.usage(own)
    for _ in range(ROUNDS):
        for index in range(max(map(len, processes.values()))):
            for name, group in processes.items():
                for prompt, times in ask(group[index], "run").items():
                    known = best[name][index].get(prompt, times)
                    best[name][index][prompt] = [min(pair) for pair in zip(known, times, strict=True)]
    others = machine.between(before, machine.usage(own)).others_share
    result: dict[str, Any] = {"others_share_of_cores": others}
    for name, each in best.items():
        result[name] = {
            prompt: {
                "prefill_tokens_per_s": round(int(prompt) / median(times[prompt][0] for times in each), 1),
                "decode_tokens_per_s": round(1 / median(times[prompt][1] for times in each), 1),
                "decode_of_processes": [round(1 / times[prompt][1], 1) for times in each],
            }
            for prompt in prompts
        }
    return result


def _beside_neighbour(
    processes: dict[str, list[subprocess.Popen[str]]], prompts: list[str], machine: Machine
) -> dict[str, Any]:
    """Measure two processes of each subject while another process keeps one core busy."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        return measured({name: group[:2] for name, group in processes.items()}, prompts, machine)
    finally:
        neighbour.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifacts", nargs="*", metavar="NAME=ARTIFACT")
    parser.add_argument("--spin", default="off,brief,on")
    parser.add_argument("--prompts", default="128,512")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--quiet-only", action="store_true", help="do not measure beside a busy process too")
    parser.add_argument("--child", type=Path)
    parser.add_argument("--model", help="what the output file calls the artifacts' model")
    parser.add_argument("--output", "-o", type=Path, help="a file to which the model is added")
    arguments = parser.parse_args()
    prompts = arguments.prompts.split(",")
    if arguments.child:
        child(arguments.child, [int(prompt) for prompt in prompts])
        return
    machine = Machine()
    processes = {
        f"{name} {spin}": [start(folder, spin, arguments.prompts) for _ in range(arguments.processes)]
        for name, _, folder in (artifact.partition("=") for artifact in arguments.artifacts)
        for spin in arguments.spin.split(",")
    }
    try:
        for group in processes.values():
            for each in group:
                ask(each, "run")  # opens and warms up
        found = {"quiet": measured(processes, prompts, machine)}
        found["idle_seconds_of_processor_a_second"] = {
            name: round(median(ask(each, "rest")["idle"] for each in group), 4) for name, group in processes.items()
        }
        if not arguments.quiet_only:
            found["beside_one_busy_process"] = _beside_neighbour(processes, prompts, machine)
    finally:
        for group in processes.values():
            for each in group:
                each.kill()
    print(json.dumps(found, indent=1))
    if arguments.output:
        known = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        stored = {**known, "measured": date.today().isoformat(), arguments.model: found}
        arguments.output.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
