"""Measures how long opening artifacts takes, each time in a process of its own, in turns; writes JSON.

    python -m examples.benchmarks.opening ARTIFACT... [--tree FOLDER] [--rounds 7] [--data FILE]

Each process imports what opening needs (edgekit, numpy, tokenizers and the target's library) before its clock starts,
opens the artifact, makes one token, closes and opens again. `--tree` measures another checkout in the same turns, such
as the one before a change. Files are in memory, and packed weights are made before the first round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Text, because it must run in trees that lack this file.
CHILD = """
import json, sys, time
begun, processor = time.perf_counter(), time.process_time()
import edgekit, edgekit.runtime.open, numpy, tokenizers, tokenizers.models
target = json.loads(open(sys.argv[1] + "/manifest.json").read())["plan"]["target"]
if target == "onnx":
    import onnxruntime, edgekit_onnx.engine
else:
    import edgekit_llamacpp.engine, edgekit_llamacpp.library
    edgekit_llamacpp.library.load()
seen = {"importing_s": time.perf_counter() - begun}
for name in ("opening", "opening_again"):
    start, processor = time.perf_counter(), time.process_time()
    runtime = edgekit.open(sys.argv[1])
    seen[f"{name}_s"], seen[f"{name}_cpu_s"] = time.perf_counter() - start, time.process_time() - processor
    start = time.perf_counter()
    runtime.generate("Once", max_tokens=1)
    seen[f"{name}_first_token_s"] = time.perf_counter() - start
    seen[f"{name}_private_mb"] = runtime.memory().private_bytes / 1e6
    runtime.close()
print(json.dumps(seen))
"""


def measured(artifact: Path, tree: Path) -> dict[str, float]:
    """Open an artifact with the edgekit of `tree`, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree), str(tree / "targets")))}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(artifact)], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("artifacts", nargs="+", type=Path)
    parser.add_argument("--tree", action="append", type=Path, default=[], help="another checkout to measure in turns")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data", type=Path, help="where to write the medians")
    options = parser.parse_args()
    subjects = [(artifact, tree) for artifact in options.artifacts for tree in (*options.tree, ROOT)]
    rows: dict[tuple[Path, Path], list[dict[str, float]]] = {subject: [] for subject in subjects}
    for subject in subjects:
        measured(*subject)  # packs weights and checks files, once
    for _ in range(options.rounds):
        for subject in subjects:
            rows[subject].append(measured(*subject))
    found = []
    for (artifact, tree), seen in rows.items():
        medians = {name: round(statistics.median(row[name] for row in seen), 3) for name in seen[0]}
        least = round(min(row["opening_s"] for row in seen), 3)
        is_here = tree == ROOT
        found.append({"artifact": artifact.name, "tree": "now" if is_here else "before", "least_s": least, **medians})
        print(json.dumps(found[-1]))
    if options.data:
        report = {"rounds": options.rounds, "load_average": round(os.getloadavg()[0], 1), "rows": found}
        options.data.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
