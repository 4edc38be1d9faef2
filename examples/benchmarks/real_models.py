"""Exports real models with every built-in recipe on every target, and measures what each artifact loses and takes.

    python -m examples.benchmarks.real_models --models smollm2 --targets onnx --recipes default s8
    python -m examples.benchmarks.real_models --keep build/real --again run

Each part of a row is added to results/real_models.jsonl as soon as it is measured, and what is there is not measured
again unless `--again` names it, or the artifact has other weights than before: an interrupted run goes on where it
stood. The row `default` is `edgekit export MODEL --device NAME` with a device for which a plan chooses the target, and
nothing else; `balanced-to-5.32` is `--bits-per-weight 5.32`. KL, equal top tokens and perplexity come from held-out
text (examples/benchmarks/held_out) that nothing is calibrated on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import edgekit
from edgekit import plugins
from edgekit.apps.bench.machine import Machine
from edgekit.common.files import write_output
from edgekit.contracts.recipe import GGUF_RECIPES, NATIVE_RECIPES, RECIPES
from examples.benchmarks.process_memory import HighWater
from examples.small_models import gemma3, smollm2

Row = dict[str, Any]

ROOT = Path(__file__).parents[2]
HELD_OUT = Path(__file__).parent / "held_out"
DATA = Path(__file__).parent / "results" / "real_models.jsonl"
MODELS = ("smollm2", "gemma3", "demo")
# Targets, and a device for which a plan chooses each. llamacpp is chosen only where it is measured to be the fastest,
# so it is asked for.
TARGETS = {"onnx": "laptop-x86-8gb", "llamacpp": "this", "executorch": "pixel-9", "mlx": "macbook-m4-16gb"}
DEFAULT = "default"
BUDGET = "balanced-to-"  # and bits a weight, over all weights
NAMES = [DEFAULT, f"{BUDGET}5.32", *RECIPES, *GGUF_RECIPES, *NATIVE_RECIPES]
KINDS = ("code", "prose")
ASKED = ("model", "target", "recipe", "effort")  # what tells rows apart
SOURCES: dict[str, Callable[[], str | Path]] = {"smollm2": smollm2, "gemma3": gemma3, "demo": lambda: "demo"}
PARTS = ("quality", "run")
CONTEXT = 1024
TOKENS = 1024  # of held-out text of each kind, and of the context that is filled, unless the command says otherwise
TRIALS = 3
ANSWER_TOKENS = 32


def read_rows(data: Path) -> dict[tuple[str, ...], Row]:
    """Rows by what was asked; a later line of the same row takes the place of an earlier one."""
    lines = data.read_text().splitlines() if data.exists() else []
    return {tuple(row[key] for key in ASKED): row for row in map(json.loads, lines)}


def add_row(row: Row, data: Path) -> None:
    """Append a row as one line, so that several runs may add rows at the same time."""
    with data.open("a") as file:
        file.write(json.dumps(row) + "\n")


def written(rows: Iterable[Row]) -> bytes:
    """The file's bytes, in the order of the tables."""
    return "".join(json.dumps(row) + "\n" for row in sorted(rows, key=place)).encode()


def place(row: Row) -> tuple[int, int, int, str]:
    """The place of a row in the tables."""
    where = MODELS.index(row["model"]), list(TARGETS).index(row["target"]), NAMES.index(row["recipe"])
    return (*where, row["effort"])


def exported(row: Row, artifact: Path) -> Row:
    """Export one artifact unless it is there; a refusal is a result too."""
    if why := plugins.load_target(row["target"]).missing():
        raise SystemExit(f"{row['target']}: {why}")
    is_default = row["recipe"] == DEFAULT
    device = TARGETS[row["target"]] if is_default else "this"
    options = ["--device", device]
    if device == "this":
        options += ["--target", row["target"]]
    if row["recipe"].startswith(BUDGET):
        options += ["--bits-per-weight", row["recipe"].removeprefix(BUDGET), "--context", str(CONTEXT)]
    elif not is_default:
        options += ["--recipe", row["recipe"], "--context", str(CONTEXT)]
    if row["effort"] != DEFAULT:
        options += ["--effort", row["effort"]]
    if not artifact.exists():
        done = command_of_edgekit("export", SOURCES[row["model"]](), *options, "-o", artifact)
        if done.returncode:
            return row | {"refused": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    manifest = json.loads((artifact / "manifest.json").read_text())
    return row | {
        "refused": None,
        "device": device,
        "self_check": manifest["self_check"],
        "stored_as": manifest["plan"]["recipe"]["name"],
        "method": (manifest["plan"]["quantisation"] or {"method": "none"})["method"],  # none: llama.cpp chose
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "weights": manifest["weights_sha256"],
    }


def measured(row: Row, artifact: Path, part: str, tokens: int, trials: int) -> Row:
    """Add a part: `quality` or `run`."""
    if part == "run":
        return row | {"run": run(artifact, tokens, trials)}
    found = {kind: quality(artifact, kind, tokens) for kind in KINDS}
    bits = [each.pop("bits_per_weight") for each in found.values()]
    return row | {"bits_per_weight": bits[0], "quality": found}


def command_of_edgekit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgekit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def answer_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    if done.returncode:
        raise SystemExit(f"{' '.join(done.args)}\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def quality(artifact: Path, kind: str, tokens: int) -> dict[str, Any]:
    text = HELD_OUT / f"{kind}.txt"
    evaluation = answer_of(command_of_edgekit("eval", artifact, "--text", text, "--tokens", str(tokens), "--json"))
    kept = ("tokens", "kl_mean", "kl_error", "same_top", "perplexity", "reference_perplexity")
    bits = {"bits_per_weight": evaluation["bits_per_weight"]}
    return {name: evaluation["divergence"][name] for name in kept} | bits


def run(artifact: Path, filled: int, trials: int) -> dict[str, Any]:
    """Fill the context and answer, in a process of its own whose memory is watched from this one."""
    command = [
        sys.executable,
        "-m",
        "examples.benchmarks.real_models",
        "--child",
        str(artifact),
        str(filled),
        str(trials),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    water = HighWater(process.pid)
    water.start()
    answer, errors = process.communicate()
    water.is_over.set()
    water.join()
    found = answer_of(subprocess.CompletedProcess(command, process.returncode, answer, errors))
    return {**found, "measured_private_bytes": water.most}


def answer(artifact: Path, filled: int, trials: int) -> dict[str, Any]:
    """Fill the context of an artifact and answer: the predicted memory, and the best speeds of a few answers.

    It runs in a process that holds little else, whose memory another one watches.
    """
    machine = Machine()
    with edgekit.open(artifact, context=filled, prefixes=0) as runtime:
        words = (HELD_OUT / "prose.txt").read_text()
        prompt = runtime.codec.encode(words, add_special_tokens=True)[: filled - ANSWER_TOKENS]
        options: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        before = machine.usage([os.getpid()])
        answers = [runtime.complete(prompt, **options) for _ in range(trials)]
        others = machine.between(before, machine.usage([os.getpid()])).others_share
        predicted = runtime.memory().predicted
    return {
        "context": filled,
        "predicted_private_bytes": predicted.private_bytes,
        "prefill_tokens_per_s": max(answer.timings.prefill_tokens_per_s or 0 for answer in answers),
        "decode_tokens_per_s": max(answer.timings.decode_tokens_per_s or 0 for answer in answers),
        "others_share": others,
    }


def effort_of(recipe: str, effort: str) -> str:
    """Only recipes of edgekit's own integers have an effort, and `default` says nothing of it."""
    return effort if recipe in RECIPES and not RECIPES[recipe].is_exact() else DEFAULT


def complete(asked: Row, again: Sequence[str], options: argparse.Namespace) -> None:
    """Measure the parts that a row lacks, each stored at once."""
    kept = read_rows(options.data).get(tuple(asked.values()), asked)

    def is_wanted(row: Row, part: str) -> bool:
        return part in again or part not in row

    if kept.get("refused") or not any(is_wanted(kept, part) for part in PARTS):
        return
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(options.keep or folder) / "-".join(asked.values())
        row = exported(kept, artifact)
        if row["refused"]:
            store(row, options.data)
            return
        if row["weights"] != kept.get("weights"):
            row = {key: value for key, value in row.items() if key not in PARTS}  # they are of other weights
        for part in PARTS:
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
    parser.add_argument("--again", nargs="*", default=[], metavar="PART", help=f"measured anew: {', '.join(PARTS)}")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the artifacts")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        artifact, filled, trials = options.child
        print(json.dumps(answer(Path(artifact), int(filled), int(trials))))
        return
    for model in options.models:
        for target in options.targets:
            for recipe in options.recipes:
                asked = dict(zip(ASKED, (model, target, recipe, effort_of(recipe, options.effort)), strict=True))
                complete(asked, options.again, options)
    if options.data == DATA:
        write_output(DATA, written(read_rows(DATA).values()))


if __name__ == "__main__":
    main()
