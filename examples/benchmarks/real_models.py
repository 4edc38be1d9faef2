"""Exports real models with every built-in recipe on every target, and measures what each artifact loses and takes.

    python -m examples.benchmarks.real_models --models smollm2 --targets onnx --recipes default s8
    python -m examples.benchmarks.real_models --models smollm2 --targets onnx --tasks hellaswag=100 humaneval=32
    python -m examples.benchmarks.real_models --keep build/real --again run
    python -m examples.benchmarks.real_models --page

Each part of a row is added to docs/data/real_models.jsonl as soon as it is measured, and what is there is not measured
again unless `--again` names it, or the artifact has other weights than before: an interrupted run goes on where it
stood. The row `default` is `edgekit export MODEL --device NAME` with a device for which a plan chooses the target, and
nothing else. KL, equal top tokens and perplexity come from held-out text (examples/benchmarks/held_out) that nothing is
calibrated on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgekit import plugins
from edgekit.common.files import write_output
from edgekit.contracts.recipe import RECIPES
from edgekit.testing.real_models import gemma3, smollm2
from examples.benchmarks.process_memory import HighWater
from examples.benchmarks.real_model_answer import HELD_OUT
from examples.benchmarks.real_model_pages import write_pages
from examples.benchmarks.real_model_rows import (
    ASKED,
    DATA,
    DEFAULT,
    KINDS,
    MODELS,
    NAMES,
    ROOT,
    TARGETS,
    Row,
    add_row,
    read_rows,
    written,
)

SOURCES: dict[str, Callable[[], str | Path]] = {"smollm2": smollm2, "gemma3": gemma3, "demo": lambda: "demo"}
PARTS = ("quality", "run")
CONTEXT = 1024
TOKENS = 1024  # of held-out text of each kind, and of the context that is filled, unless the command says otherwise
TRIALS = 3


def exported(row: Row, artifact: Path) -> Row:
    """Export one artifact unless it is there; a refusal is a result too."""
    if why := plugins.load_target(row["target"]).missing():
        raise SystemExit(f"{row['target']}: {why}")
    is_default = row["recipe"] == DEFAULT
    device = TARGETS[row["target"]] if is_default else "this"
    options = ["--device", device]
    if device == "this":
        options += ["--target", row["target"]]
    if not is_default:
        options += ["--recipe", row["recipe"], "--context", str(CONTEXT)]
    if row["effort"] != DEFAULT:
        options += ["--effort", row["effort"]]
    if not artifact.exists():
        done = edgekit("export", SOURCES[row["model"]](), *options, "-o", artifact)
        if done.returncode:
            return row | {"refused": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    manifest = json.loads((artifact / "manifest.json").read_text())
    return row | {
        "refused": None,
        "device": device,
        "self_check": manifest["self_check"],
        "stored_as": manifest["plan"]["recipe"]["name"],
        "method": manifest["plan"]["quantisation"]["method"],
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "weights": manifest["weights_sha256"],
    }


def measured(row: Row, artifact: Path, part: str, tokens: int, trials: int) -> Row:
    """Add a part: `quality`, `run` or a task with its limit."""
    if part == "run":
        return row | {"run": run(artifact, tokens, trials)}
    if part == "quality":
        found = {kind: quality(artifact, kind, tokens) for kind in KINDS}
        bits = [each.pop("bits_per_weight") for each in found.values()]
        return row | {"bits_per_weight": bits[0], "quality": found}
    task, _, limit = part.partition("=")
    return row | {"tasks": row.get("tasks", {}) | {task: answered(artifact, task, limit)}}


def is_there(row: Row, part: str) -> bool:
    task, _, limit = part.partition("=")
    share = row.get("tasks", {}).get(task)
    return part in row if part in PARTS else bool(share) and share["asked"] >= int(limit or 0)


def edgekit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgekit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def answer_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args)}\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def quality(artifact: Path, kind: str, tokens: int) -> dict[str, Any]:
    text = HELD_OUT / f"{kind}.txt"
    evaluation = answer_of(edgekit("eval", artifact, "--text", text, "--tokens", str(tokens), "--json"))
    kept = ("tokens", "kl_mean", "kl_error", "same_top", "perplexity", "reference_perplexity")
    bits = {"bits_per_weight": evaluation["bits_per_weight"]}
    return {name: evaluation["divergence"][name] for name in kept} | bits


def run(artifact: Path, filled: int, trials: int) -> dict[str, Any]:
    """Fill the context and answer, in a process of its own whose memory is watched from this one."""
    command = [sys.executable, "-m", "examples.benchmarks.real_model_answer", str(artifact), str(filled), str(trials)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    water = HighWater(process.pid)
    water.start()
    answer, errors = process.communicate()
    water.is_over.set()
    water.join()
    found = answer_of(subprocess.CompletedProcess(command, process.returncode, answer, errors))
    return {**found, "measured_private_bytes": water.most}


def answered(artifact: Path, task: str, limit: str) -> dict[str, Any]:
    options = ["--limit", limit] if limit else []
    options += ["--allow-code"] if task == "humaneval" else []
    report = answer_of(edgekit("eval", artifact, "--tasks", task, *options, "--json"))
    share: dict[str, Any] = report["results"][0]["share"]
    return share


def effort_of(recipe: str, effort: str) -> str:
    """Only recipes of edgekit's own integers have an effort, and `default` says nothing of it."""
    return effort if recipe in RECIPES and not RECIPES[recipe].is_exact() else DEFAULT


def complete(asked: Row, parts: Sequence[str], again: Sequence[str], options: argparse.Namespace) -> None:
    """Measure the parts that a row lacks, each stored at once."""
    kept = read_rows(options.data).get(tuple(asked.values()), asked)

    def is_wanted(row: Row, part: str) -> bool:
        return part in again or not is_there(row, part)

    if kept.get("refused") or not any(is_wanted(kept, part) for part in parts):
        return
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(options.keep or folder) / "-".join(asked.values())
        row = exported(kept, artifact)
        if row["refused"]:
            store(row, options.data)
            return
        if row["weights"] != kept.get("weights"):
            tasks = [f"{task}={share['asked']}" for task, share in row.get("tasks", {}).items()]
            parts = [*PARTS, *tasks, *parts]  # a task with fewer items than before is there then
            row = {key: value for key, value in row.items() if key not in (*PARTS, "tasks")}  # of other weights
        for part in dict.fromkeys(parts):
            if not is_wanted(row, part):
                continue
            print(*asked.values(), part, flush=True)
            tokens = options.tokens or kept.get("run", {}).get("context", TOKENS)
            row = measured(row, artifact, part, tokens, options.trials)
            store(row, options.data)


def store(row: Row, data: Path) -> None:
    print(json.dumps(row), flush=True)
    add_row(row, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--recipes", nargs="+", choices=NAMES, default=[DEFAULT, *RECIPES])
    parser.add_argument("--effort", choices=["quick", "normal"], default="quick", help="of rows that are not default")
    text = "of text of each kind, and of the filled context; without it, as many as before"
    parser.add_argument("--tokens", type=int, help=text)
    parser.add_argument("--trials", type=int, default=TRIALS, help="answers, the fastest of which counts")
    parser.add_argument("--tasks", nargs="*", default=[], metavar="NAME[=LIMIT]", help="public tasks of these rows")
    parser.add_argument("--again", nargs="*", default=[], metavar="PART", help=f"measured anew: {', '.join(PARTS)}")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the artifacts")
    parser.add_argument("--page", action="store_true", help="only write the pages from the data")
    parser.add_argument("--data", type=Path, default=DATA)
    options = parser.parse_args()
    for model in [] if options.page else options.models:
        for target in options.targets:
            for recipe in options.recipes:
                asked = dict(zip(ASKED, (model, target, recipe, effort_of(recipe, options.effort)), strict=True))
                complete(asked, [*PARTS, *options.tasks], options.again, options)
    if options.data == DATA:
        rows = read_rows(DATA).values()
        write_output(DATA, written(rows))
        write_pages(rows)


if __name__ == "__main__":
    main()
